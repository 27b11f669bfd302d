"""What a daemon and its workers hold of the machine, seen from outside through /proc."""

import asyncio
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

ARENA = "/memfd:genserve-arena"
RESIDENT_ALLOWANCE_BYTES = 192 << 20
"""By how much the private memory of all processes together may exceed the baseline.

A leaked version of the tiny model (1 MB) is found by counting arenas and maps; memory is watched for what has no name.
vLLM's worker grows while it generates: measured without genserve, 64 streams of 400 tokens again and again, by 15 MiB
the first time, 4 the fifth and 1 the tenth. What malloc keeps of large blocks would come on top, twice as much on a
busy machine: processes that start warm do not keep them (see warm/process.py). A thread of gRPC that has unpacked a
compressed message up to the limit keeps its 64 MiB for the next one: measured 61 MiB after the first, and 137 when two
threads had done so. A fault that kept one message of a push, or one version, each time would pass 192 MiB within
tests/faults.
"""
_CENSUS_TIMEOUT_S = 60.0
_NUM_ALIKE = 3


@dataclass(frozen=True)
class Footprint:
    """Counts of one moment.

    `open_files` are the daemon's by kind, without arenas and connections to this process; `tasks` its asyncio tasks by
    coroutine; `shared_files` the files in /dev/shm that one of the processes maps or has open; `private_bytes` and
    `worker_threads` are of all processes, and of all but the daemon.
    """

    processes: int
    open_files: Counter[str]
    arenas: int
    arena_bytes: int
    arena_maps: int
    worker_threads: int
    shared_files: frozenset[str]
    tasks: Counter[str]
    private_bytes: int

    def beyond(self, baseline: "Footprint") -> dict[str, str]:
        """What differs from the baseline, by name. Memory may be less, and a little more."""
        differing = {}
        for name in ("processes", "worker_threads"):
            there, expected = getattr(self, name), getattr(baseline, name)
            if there != expected:
                differing[name] = f"{there}, was {expected}"
        # The arena that is kept for the next push goes with a push that fails; the next two bring it back.
        for name in ("arenas", "arena_bytes", "arena_maps"):
            there, expected = getattr(self, name), getattr(baseline, name)
            if there > expected:
                differing[name] = f"{there}, was {expected}"
        if self.shared_files != baseline.shared_files:
            differing["shared_files"] = f"{sorted(self.shared_files ^ baseline.shared_files)} came or went"
        for name in ("open_files", "tasks"):
            there, expected = getattr(self, name), getattr(baseline, name)
            if there != expected:
                differing[name] = f"more {dict(there - expected)}, fewer {dict(expected - there)}"
        if self.private_bytes > baseline.private_bytes + RESIDENT_ALLOWANCE_BYTES:
            differing["private_bytes"] = f"{self.private_bytes >> 20} MiB, was {baseline.private_bytes >> 20} MiB"
        return differing


async def measure(daemon_pid: int, census: Path, *, memory: bool = True) -> Footprint:
    """The footprint now. `census` is where the daemon writes its tasks when it is asked (see faulty_worker); it gives
    back what its allocator keeps then. Without `memory`, for which the kernel walks the pages of every process,
    `private_bytes` is 0."""
    tasks = await _tasks(daemon_pid, census)
    processes = tree(daemon_pid)
    arenas = [size for process in processes for size in arena_sizes(process.pid)]
    mapped = [line for process in processes for line in _maps(process.pid)]
    opened = [name for process in processes for name in _open_files(process.pid)]
    return Footprint(
        processes=len(processes),
        open_files=_files_by_kind(daemon_pid),
        arenas=len(arenas),
        arena_bytes=sum(arenas),
        arena_maps=sum(ARENA in line for line in mapped),
        worker_threads=sum(process.num_threads() for process in processes[1:]),
        shared_files=_shared_among([*mapped, *opened]),
        tasks=tasks,
        private_bytes=sum(private_bytes(process) for process in processes) if memory else 0,
    )


async def at_rest(daemon_pid: int, census: Path, timeout_s: float = 90.0) -> Footprint:
    """The footprint when its tasks and files have stopped changing: calls end a moment after their clients know it, and
    what is still there by chance would be missed ever after."""
    async with asyncio.timeout(timeout_s):
        before = await measure(daemon_pid, census, memory=False)
        num_alike = 0
        while num_alike < _NUM_ALIKE:
            await asyncio.sleep(0.3)
            now = await measure(daemon_pid, census, memory=False)
            is_alike = (now.tasks, now.open_files) == (before.tasks, before.open_files)
            num_alike, before = num_alike + 1 if is_alike else 0, now
        with_memory = await measure(daemon_pid, census)  # which may meet a ping of the engine
        return replace(with_memory, tasks=before.tasks, open_files=before.open_files)


async def settled(
    daemon_pid: int, census: Path, baseline: Footprint, timeout_s: float, *, memory: bool = True
) -> dict[str, str]:
    """What still differs from the baseline when it had some seconds to go away; nothing tells when it has. Memory is
    looked at when nothing else differs any more, and at the end."""
    deadline_s, look_s = time.monotonic() + timeout_s, 0.05
    while True:
        is_over = time.monotonic() > deadline_s
        differing = (await measure(daemon_pid, census, memory=memory and is_over)).beyond(baseline)
        if not differing and memory and not is_over:
            differing = (await measure(daemon_pid, census)).beyond(baseline)
        if not differing or is_over:
            return differing
        await asyncio.sleep(look_s)
        look_s = min(2 * look_s, 0.5)  # a look costs more than what is looked at


def tree(daemon_pid: int) -> list[psutil.Process]:
    """The daemon and all it has started, the daemon first."""
    daemon = psutil.Process(daemon_pid)
    return [daemon, *daemon.children(recursive=True)]


def private_bytes(process: psutil.Process) -> int:
    """Memory that is this process's alone: what it shares (arenas, libraries) is not counted by each that maps it."""
    return int(process.memory_full_info().uss)


def shared_files(processes: list[psutil.Process]) -> frozenset[str]:
    """Files in /dev/shm that these processes map or have open: others on the machine have theirs there too."""
    return _shared_among(place for each in processes for place in (*_maps(each.pid), *_open_files(each.pid)))


class Remains:
    """What may be left of a daemon when it is gone: its processes and its files in /dev/shm, as they are now."""

    def __init__(self, daemon_pid: int) -> None:
        self._processes = tree(daemon_pid)
        self.files = shared_files(self._processes)

    async def left(self, timeout_s: float = 60.0) -> list[str]:
        """What is still there when the processes had some time to end."""
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._processes, timeout_s)
        return [*map(str, alive), *(name for name in sorted(self.files) if _is_shared(name))]


def _shared_among(places: Iterable[str]) -> frozenset[str]:
    names = [place.partition("/dev/shm/")[2] for place in places]
    return frozenset(name for name in names if name and not name.endswith(" (deleted)"))


def _is_shared(name: str) -> bool:
    return Path("/dev/shm", name).exists()


def reset_peak(daemon_pid: int) -> None:
    """Lets the peak of resident memory begin anew."""
    Path(f"/proc/{daemon_pid}/clear_refs").write_text("5")


def resident_bytes(daemon_pid: int, *, peak: bool = False) -> int:
    """The daemon's resident memory, or its peak since `reset_peak`."""
    key = "VmHWM:" if peak else "VmRSS:"
    lines = Path(f"/proc/{daemon_pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def _files_by_kind(daemon_pid: int) -> Counter[str]:
    """The daemon's open files without its connections to this process: gRPC ends one when Python frees its last call,
    and a test has no influence on that."""
    names = (name for name in _open_files(daemon_pid) if ARENA not in name)  # counted apart
    kinds = Counter(re.sub(r"\[\d+\]|\d+", "", name) for name in names)
    ours = {each.laddr for each in psutil.Process().net_connections("tcp") if each.raddr}
    theirs = [each.raddr for each in psutil.Process(daemon_pid).net_connections("tcp") if each.raddr]
    kinds["socket:"] -= sum(address in ours for address in theirs)
    return kinds


def _maps(pid: int) -> Iterator[str]:
    with suppress(OSError), open(f"/proc/{pid}/maps") as maps:
        yield from (line.rstrip("\n") for line in maps)


def _open_files(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{fd}")


def arena_sizes(pid: int) -> Iterable[int]:
    """Of those that a process has open, each once: a map of one has a descriptor of its own."""
    sizes = {}
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(ARENA):
                    status = os.stat(f"/proc/{pid}/fd/{fd}")
                    sizes[status.st_ino] = status.st_size
    return sizes.values()


async def _tasks(daemon_pid: int, census: Path) -> Counter[str]:
    _ask_for_tasks(daemon_pid, census)
    async with asyncio.timeout(_CENSUS_TIMEOUT_S):
        while (tasks := _read_tasks(census)) is None:
            await asyncio.sleep(0.01)
    return tasks


def _ask_for_tasks(daemon_pid: int, census: Path) -> None:
    census.unlink(missing_ok=True)
    os.kill(daemon_pid, signal.SIGUSR2)


def _read_tasks(census: Path) -> Counter[str] | None:
    return Counter(json.loads(census.read_text())) if census.exists() else None
