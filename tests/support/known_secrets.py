"""Tokens that a scan finds wherever they are told: each begins with a mark that nothing else has."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

VARIABLE: Final = "GENSERVE_TOKEN"
"""Clients send the token in it. The tests of real daemons have one there."""
_MARK: Final = "known-secret-"
_KEY: Final = "PRIVATE KEY-----"
_HOLDERS: Final = frozenset({".crt", ".header", ".key", ".pem", ".token"})
"""Files that are there to hold secrets, by their suffixes."""
_MAX_BYTES: Final = 64 << 20


class SecretLeakedError(AssertionError):
    """A secret is where it must not be. `is_final`: the test gets no second try."""

    is_final = True


def known_token() -> str:
    """A new one."""
    return _MARK + secrets.token_urlsafe(32)


def check_told(where: str, text: str) -> None:
    """Raises SecretLeakedError if a text has a token or a key in it. The error does not repeat the text."""
    if _MARK in text or _KEY in text:
        raise SecretLeakedError(f"a secret is in {where}")


def check_arguments(pid: int) -> None:
    """Looks at the command lines of a process and of everything that it has started."""
    parent = psutil.Process(pid)
    for process in [parent, *parent.children(recursive=True)]:
        try:
            check_told(f"the arguments of {process.name()}", " ".join(process.cmdline()))
        except psutil.NoSuchProcess:
            continue  # it has just ended


def check_files(directory: Path) -> int:
    """Looks into everything that tests and their daemons have left in a directory, such as logs; how many files."""
    number = 0
    for path in _files(directory):
        check_told(str(path), path.read_bytes().decode(errors="replace"))
        number += 1
    return number


def _files(directory: Path) -> Iterator[Path]:
    for path in directory.rglob("*"):
        is_holder = path.suffix in _HOLDERS or path.suffix == ".safetensors"
        if not is_holder and path.is_file() and not path.is_symlink() and path.stat().st_size <= _MAX_BYTES:
            yield path
