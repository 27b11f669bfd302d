"""What tests cost (`--costs`): the seconds that they take, and the CPU seconds of their process and all that it starts,
by folder and for the most expensive ones. Where several processes of tests share a machine, time alone tells little."""

import os
import resource
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

_CPU: Final = "cpu_s"
_NUM_TESTS: Final = 30
_TICKS: Final = os.sysconf("SC_CLK_TCK")


class Costs:
    """A plugin that measures in the process that runs a test, and sums up in the one that receives all reports."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._cpu_s: defaultdict[str, float] = defaultdict(float)
        self._took_s: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None]:
        """Begins to measure. The other two phases begin where the one before ended."""
        self._began_s = cpu_s(os.getpid())
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        """Adds what the phase has cost to its report."""
        report = yield
        now_s = cpu_s(os.getpid())
        # What a process has used is seen no more once it has ended and nobody below here has waited for it.
        report.user_properties = [*report.user_properties, (_CPU, max(0.0, now_s - self._began_s))]
        self._began_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Sums the phases of each test up."""
        self._took_s[report.nodeid] += report.duration
        self._cpu_s[report.nodeid] += sum(value for name, value in report.user_properties if name == _CPU)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints the sums."""
        terminalreporter.section("costs")
        folders: defaultdict[str, list[str]] = defaultdict(list)
        for test in self._cpu_s:
            folders[str(Path(test.partition("::")[0]).parent)].append(test)
        lines = [(self._sums(tests), f"{len(tests):6d} tests  {folder}") for folder, tests in folders.items()]
        tests = [(self._sums([test]), test) for test in self._cpu_s]
        for each in (sorted(lines, reverse=True), sorted(tests, reverse=True)[:_NUM_TESTS]):
            for (used_s, took_s), name in each:
                terminalreporter.write_line(f"{used_s:8.1f} s of CPU {took_s:8.1f} s  {name}")

    def _sums(self, tests: Sequence[str]) -> tuple[float, float]:
        return sum(self._cpu_s[each] for each in tests), sum(self._took_s[each] for each in tests)


def cpu_s(process: int) -> float:
    """CPU seconds of this process, of those that it started and has waited for, and of all that run below it."""
    waited = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    total_s = sum(each.ru_utime + each.ru_stime for each in waited)
    below = _children(process)
    while below:
        child = below.pop()
        try:
            fields = Path(f"/proc/{child}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        total_s += sum(map(int, fields[11:15])) / _TICKS
        below += _children(child)
    return total_s


def _children(process: int) -> list[int]:
    """Those of all its threads. The first one is looked at last: it has the children of one that ends meanwhile."""
    found: set[int] = set()
    try:
        threads = sorted(os.listdir(f"/proc/{process}/task"), key=str(process).__eq__)
    except FileNotFoundError:  # it has ended
        return []
    for thread in threads:
        with suppress(FileNotFoundError, ProcessLookupError):  # this one has ended, or this kernel does not tell
            found |= set(map(int, Path(f"/proc/{process}/task/{thread}/children").read_text().split()))
    return sorted(found)
