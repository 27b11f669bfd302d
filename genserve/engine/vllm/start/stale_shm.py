"""Shared memory that killed engines have left behind.

genserve's memory is anonymous and is freed with the last process (see memory.arena). On the CPU vLLM's ranks share a
file in /dev/shm, which nobody removes when they are killed.

Files of Python (psm_*, sem.mp-*) are kept. Python's resource tracker removes them when an engine is killed. They stay
if the tracker is killed too, for example when a container ends. Then nothing tells their owner: any program of the user
has such names, and an unmapped file may be waiting for a process that is about to map it.
"""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"vllm_dist_[0-9a-f]{32}-.*cpushm_\d+")
_MIN_AGE_S = 60.0


def sweep(shm: Path = Path("/dev/shm"), proc: Path = Path("/proc"), *, min_age_s: float = _MIN_AGE_S) -> list[str]:
    """Removes files that no process maps any more, and returns their names. Files of other users are kept, and young
    ones, which an engine may be about to map."""
    old = [path for path in _files(shm, min_age_s) if _NAME.fullmatch(path.name)]
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
