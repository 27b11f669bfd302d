"""What the engine's processes did lately, from /proc: whether they work, stand still, or were stopped."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_STOPPED = frozenset("tT")
_WAITS_FOR_IO = "D"
_RUNS = "R"


@dataclass(frozen=True, slots=True)
class Activity:
    """`cpu_s`: CPU seconds of all processes since they began, including ended ones. `runs`: whether a process would run
    if it had a CPU. `stopped`: whether a signal or a debugger stopped a process. `waits_for_io`: whether a process
    waits in the kernel for a disk or a device. `steps`: steps of the engine with results, of the data-parallel engine
    with the fewest."""

    cpu_s: float
    runs: bool
    stopped: bool
    waits_for_io: bool
    steps: int


def observer(pids: Sequence[int], steps: Callable[[], int]) -> Callable[[], Activity]:
    """Observes these processes and their descendants. Processes that have ended do not count."""

    def observe() -> Activity:
        cpu_s, states = 0.0, set()
        for pid in pids:
            for fields in _tree(pid):
                states.add(fields[0])
                # Its own CPU time, and that of children that have ended, such as compilers.
                cpu_s += sum(map(int, fields[11:15])) / _TICKS_PER_SECOND
        return Activity(cpu_s, _RUNS in states, not _STOPPED.isdisjoint(states), _WAITS_FOR_IO in states, steps())

    return observe


def _tree(pid: int) -> Iterator[list[str]]:
    """The fields of /proc/PID/stat from the third (the state) on, of a process and its descendants."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # The name in the second field may contain anything.
            fields = stat.read().rpartition(")")[2].split()
        children = [child for task in os.listdir(f"/proc/{pid}/task") for child in _children(pid, task)]
    except (FileNotFoundError, ProcessLookupError):
        return
    yield fields
    for child in children:
        yield from _tree(child)


def _children(pid: int, task: str) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{task}/children") as children:
            return [int(child) for child in children.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
