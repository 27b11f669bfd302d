"""What the reader of a failed test needs, and what CI's machine takes with it: whether the machine stood still, and the
ends of the logs that daemons, routers and fleets wrote meanwhile."""

import contextlib
import os
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

STANDSTILL: Final = "standstill_s"
"""The property of a failed test's report with the longest time in which its process did not get to run, in seconds."""
_TICK_S: Final = 0.05
_NUM_LINES: Final = 40
_MAX_LOGS: Final = 4
_MAX_BYTES: Final = 16 << 10


class _Clock(threading.Thread):
    """Measures how late this process gets to run. `longest_s` may be set back."""

    def __init__(self) -> None:
        super().__init__(name="standstill clock", daemon=True)
        self.longest_s = 0.0

    def run(self) -> None:
        while True:  # by a clock that no test sets forward
            began_s = time.perf_counter()
            time.sleep(_TICK_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - began_s - _TICK_S)


class FailureEvidence:
    """A plugin that adds sections to the reports of failed tests."""

    def __init__(self) -> None:
        self._clock = _Clock()
        self._clock.start()
        self._began_s = time.time()
        self._waited_s = _cpu_pressure_s()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Begins to measure."""
        self._clock.longest_s, self._began_s, self._waited_s = 0.0, time.time(), _cpu_pressure_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Adds what was measured, and the logs below the run's temporary directory."""
        report = yield
        if report.failed:
            standstill_s = round(self._clock.longest_s, 3)
            report.user_properties = [*report.user_properties, (STANDSTILL, standstill_s)]
            report.sections.append(("the machine", self._machine(standstill_s)))
            report.sections += _logs(_directory(item.config), self._began_s)
        return report

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: Any) -> None:
        """Adds the logs of a worker that has died, in the process that notices."""
        worker = report.node
        logs = _logs(_directory(worker.config) / f"popen-{worker.gateway.id}", self._began_s)
        report.sections += [(f"{name}, one of the last that its process wrote", end) for name, end in logs]

    def _machine(self, standstill_s: float) -> str:
        took_s = max(time.time() - self._began_s, 1e-3)
        waited = (_cpu_pressure_s() - self._waited_s) / took_s
        return (
            f"{took_s:.1f} s; this process did not run for {standstill_s:.2f} s at most; something waited for a CPU "
            f"{waited:.0%} of the time; load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"
            + "".join(f"\nnothing can interrupt {each}" for each in _blocked())
        )


def _directory(config: Any) -> Path:
    """What the tests of this process write is below it, and what those of its workers do."""
    return Path(config._tmp_path_factory.getbasetemp())


def _logs(directory: Path, since_s: float) -> list[tuple[str, str]]:
    # Daemons that run on remove files and directories meanwhile; os.walk leaves out what has gone.
    paths = [Path(where) / name for where, _, names in os.walk(directory) for name in names]
    logs = [(_changed_s(path), path) for path in paths if _is_log(path)]
    recent = sorted((each for each in logs if each[0] >= since_s), reverse=True)[:_MAX_LOGS]
    return [(str(path.relative_to(directory)), _end(path)) for _, path in recent]


def _blocked() -> list[str]:
    """The threads that nothing can interrupt now: their process, and what each of them waits for."""
    found: list[str] = []
    for stat in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            name, state = stat.read_text(errors="replace").split("(", 1)[1].rsplit(") ", 1)
            if state.startswith("D "):
                found.append(f"{name} {stat.parent.name}, which waits in {stat.with_name('wchan').read_text()}")
    return found


def _is_log(path: Path) -> bool:
    named = path.suffix in ("", ".log") or path.name.startswith(("daemon", "replica", "router", "stderr"))
    return named and path.is_file() and path.name != ".lock"


def _changed_s(path: Path) -> float:
    """When it was last written to, 0 if it has gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _end(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-_NUM_LINES:])
    except OSError as error:
        return f"it could not be read: {error}"


def _cpu_pressure_s() -> float:
    """For how long some process of this machine has waited for a CPU, in seconds; 0 where the kernel does not say."""
    try:
        line = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:
        return 0.0
    return int(line.rsplit("total=", 1)[1]) / 1e6
