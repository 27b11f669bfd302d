"""The activity of the engine's processes, from /proc: they work, stand still, or were stopped."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_STOPPED = frozenset("tT")
_WORKS = frozenset("RD")
"""R: runs, or would if it had a CPU. D: waits in the kernel for a disk or a device."""


@dataclass(frozen=True, slots=True)
class Activity:
    """`cpu_s`: CPU seconds of all processes since they began, including ended ones. `works`: whether a thread runs,
    would run if it had a CPU, or waits for a disk or a device. `stopped`: whether a signal or a debugger stopped a
    process. `steps`: steps of the engine with results, of the data-parallel engine with the fewest."""

    cpu_s: float
    works: bool
    stopped: bool
    steps: int


class Processes:
    """These processes and their descendants. Those that have ended do not count."""

    def __init__(self, pids: Sequence[int], steps: Callable[[], int]) -> None:
        self._pids = pids
        self._steps = steps

    def any_stopped(self) -> bool:
        """Whether one is stopped. A stop holds all threads of a process, so looking at the first one is enough."""
        return any(fields[0] in _STOPPED for _, fields in self._all())

    def activity(self) -> Activity:
        """The activity now. Reads every thread, of which there may be hundreds, so call it only to judge an engine."""
        cpu_s, stopped, states = 0.0, False, set[str]()
        for pid, fields in self._all():
            # Its own CPU time, and that of children that have ended, such as compilers.
            cpu_s += sum(map(int, fields[11:15])) / _TICKS_PER_SECOND
            stopped = stopped or fields[0] in _STOPPED
            # A process reports the state of its first thread, which may sleep while another one works.
            states.update(_thread_states(pid))
        return Activity(cpu_s, not _WORKS.isdisjoint(states), stopped, self._steps())

    def _all(self) -> Iterator[tuple[int, list[str]]]:
        for pid in self._pids:
            yield from _tree(pid)


def _tree(pid: int) -> Iterator[tuple[int, list[str]]]:
    """A process and its descendants, each with the fields of its /proc/PID/stat from the third (the state) on."""
    try:
        fields = _stat(f"/proc/{pid}")
        children = [child for task in os.listdir(f"/proc/{pid}/task") for child in _children(pid, task)]
    except (FileNotFoundError, ProcessLookupError):
        return
    yield pid, fields
    for child in children:
        yield from _tree(child)


def _thread_states(pid: int) -> Iterator[str]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return
    for task in tasks:
        try:
            yield _stat(f"/proc/{pid}/task/{task}")[0]
        except (FileNotFoundError, ProcessLookupError):
            continue


def _stat(directory: str) -> list[str]:
    with open(f"{directory}/stat") as stat:
        # The name in the second field may contain anything.
        return stat.read().rpartition(")")[2].split()


def _children(pid: int, task: str) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{task}/children") as children:
            return [int(child) for child in children.read().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []
