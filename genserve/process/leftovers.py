"""Temporary directories that daemons of this user have left behind because they were killed, or ended at once by a
signal during the start: their names tell whose they are.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
KINDS: Final = ("ingest", "lora", "metrics", "start")
_DIRECTORY: Final = re.compile(rf"genserve-({'|'.join(KINDS)})-(\d+)-(?:(\d+)-)?\w+")


def prefix(kind: str) -> str:
    """How the name of a temporary directory of this process begins; `kind`: one of KINDS."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
    return f"genserve-{kind}-{os.getpid()}-{_namespace()}-"


def sweep(temporary: Path | None = None) -> None:
    """Removes those whose process has ended. Daemons that start at the same time may all do it."""
    for path in (temporary or Path(tempfile.gettempdir())).glob("genserve-*"):
        named = _DIRECTORY.fullmatch(path.name)
        if named is None or named[3] not in (None, _namespace()):  # its process cannot be seen from here
            continue
        if not (_PROC / named[2]).exists() and _is_ours(path):
            shutil.rmtree(path, ignore_errors=True)


def _namespace() -> str:
    """In which the ids of processes are counted. Containers may share a temporary directory, and not their ids."""
    return str((_PROC / "self" / "ns" / "pid").stat().st_ino)


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except FileNotFoundError:  # another daemon that starts removes it too
        return False
