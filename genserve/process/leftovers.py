"""Removes what daemons of this user have left behind because they were killed, or ended at once by a signal during the
start: temporary directories, whose names tell whose they are, and shared memory of their engines.
"""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
KINDS: Final = ("ingest", "lora", "metrics", "start")
_DIRECTORY: Final = re.compile(rf"genserve-({'|'.join(KINDS)})-(\d+)-(?:(\d+)-)?\w+")
_SHARED_MEMORY: Final = re.compile(r"vllm_dist_[0-9a-f]{32}-.*cpushm_\d+")
_MIN_AGE_S: Final = 60.0


def prefix(kind: str) -> str:
    """How the name of a temporary directory of this process begins; `kind`: one of KINDS."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is none of {', '.join(KINDS)}")
    return f"genserve-{kind}-{os.getpid()}-{_namespace()}-"


def sweep(temporary: Path | None = None) -> None:
    """Removes temporary directories whose process has ended. Daemons that start at the same time may all do it."""
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


def sweep_shared_memory(
    shm: Path = Path("/dev/shm"), proc: Path = _PROC, *, min_age_s: float = _MIN_AGE_S
) -> list[str]:
    """Removes shared memory of engines that no process maps any more, and returns the names of its files. Files of
    other users are kept, and young ones, which an engine may be about to map.

    genserve's memory is anonymous and is freed with the last process (see memory.arena). On the CPU vLLM's ranks share
    a file in /dev/shm, which nobody removes when they are killed. Files of Python (psm_*, sem.mp-*) are kept. Python's
    resource tracker removes them when an engine is killed. They stay if the tracker is killed too, for example when a
    container ends. Then nothing tells their owner: any program of the user has such names, and an unmapped file may be
    waiting for a process that is about to map it."""
    old = [path for path in _files(shm, min_age_s) if _SHARED_MEMORY.fullmatch(path.name)]
    if not old:
        return []
    mapped = {line.rsplit("/", 1)[-1].removesuffix(" (deleted)") for line in _maps(proc) if "vllm_dist_" in line}
    swept = []
    for path in old:
        if path.name not in mapped:
            path.unlink(missing_ok=True)
            swept.append(path.name)
    return swept


def _files(shm: Path, min_age_s: float) -> Iterator[Path]:
    if not shm.is_dir():
        return
    for path in shm.iterdir():
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > min_age_s:
            yield path


def _maps(proc: Path) -> Iterator[str]:
    for path in proc.glob("[0-9]*/maps"):
        try:
            yield from os.fsdecode(path.read_bytes()).splitlines()  # names need not be UTF-8
        except OSError:
            continue  # ended meanwhile, or belongs to another user, whose files are not removed
