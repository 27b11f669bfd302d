"""A second try for failed tests: alone, in a new process of pytest, after all others have ended.

A test may fail because the machine stood still for seconds, and one such failure among thousands must not turn a run
red. So the controller runs each failed test again when xdist's workers and their daemons have ended. The tests of its
file that ran before it run before it again: what an earlier test spoilt, such as an engine that both share, is spoilt
again. A repetition at once, beside the other worker and on the same engine, would tell nothing.

What passes then is reported as FLAKY and recorded in tests/flaky.tsv, where nobody may stand twice. Some failures are
final: see `_final_reason`.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support import flaky_record
from tests.support.failure_evidence import STANDSTILL

MAX_FAILED: Final = 3
"""More failures than these have a cause that a second try would hide. A fixture that fails is one failure, however many
tests use it."""
_LIMIT_S: Final = 900.0
_MIN_STANDSTILL_S: Final = 0.5
"""A test that failed without one, and passes later, may have found a race of the product."""
_NUM_BEFORE: Final = 5
_FINAL: Final = "final"
_CAUSE: Final = "cause"
_CAUSES: Final = itertools.count()


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Notes in a test's report if its failure is final: random tests, and errors that no busy machine explains. And
    which error it is: pytest raises that of a fixture of several tests again for each of them."""
    if call.excinfo is not None and call.when == "setup":
        number = vars(call.excinfo.value).setdefault(f"_{_CAUSE}", next(_CAUSES))
        item.user_properties.append((_CAUSE, number))
    is_random = item.get_closest_marker("failure_is_final") or item.get_closest_marker("hypothesis")
    is_final = call.excinfo is not None and any(getattr(each, "is_final", False) for each in _all(call.excinfo))
    if (is_random or is_final) and _properties(item).get(_FINAL) is None:
        item.user_properties.append((_FINAL, "what it found counts, however often it passes"))


class OnceMore:
    """A plugin of the process that receives all reports."""

    def __init__(self, config: pytest.Config, record: Path) -> None:
        self._config = config
        self._record = record
        self._first: dict[str, pytest.TestReport] = {}
        self._final: dict[str, str] = {}
        # Tests by file, in the order in which they ran: one worker runs a whole file.
        self._order: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._workers: dict[str, str] = {}
        self._lines: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes what runs, what fails, and why a failure is final."""
        self._order[_file(report.nodeid)].setdefault(report.nodeid)
        self._workers[_file(report.nodeid)] = getattr(report, "worker_id", "")
        if report.failed:
            self._first.setdefault(report.nodeid, report)
            if reason := _final_reason(report):
                self._final[report.nodeid] = reason

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes files that cannot be collected: their tests did not run."""
        if report.failed:
            self._final[report.nodeid] = "it cannot be collected"

    @pytest.hookimpl(trylast=True)  # after xdist has ended its workers
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Tries failed tests again. The run passes if all of them do."""
        if exitstatus != pytest.ExitCode.TESTS_FAILED:
            return  # passed, or interrupted
        if stopped := session.shouldfail or session.shouldstop:  # by -x
            self._lines.append(f"none is tried once more, as others did not run: {stopped}")
            return
        self._lines += [f"FINAL  {nodeid}: {reason}" for nodeid, reason in self._final.items()]
        if self._final or not self._first:
            return
        failures = self._failures()
        if len(failures) > MAX_FAILED:
            self._lines.append(f"{len(failures)} failures, more than {MAX_FAILED}: none is tried once more")
        elif all([self._passes(nodeids) for nodeids in failures]):
            session.exitstatus = pytest.ExitCode.OK

    def _failures(self) -> list[list[str]]:
        """The tests of each failure: one for each test that failed, and one for all that a fixture failed."""
        tests: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
        for nodeid, report in self._first.items():
            what = (_file(nodeid), _properties(report).get(_CAUSE, nodeid)) if report.when == "setup" else (nodeid,)
            tests[what].append(nodeid)
        return list(tests.values())

    def _passes(self, nodeids: list[str]) -> bool:
        """Tries what one failure is about: its tests, after those of their file that ran before the last of them."""
        nodeid, first = nodeids[0], self._first[nodeids[0]]
        ran = list(self._order[_file(nodeid)])
        tried = ran[: max(map(ran.index, nodeids)) + 1]
        began_s = time.monotonic()
        status, output = self._run(tried)
        said = _last_line(first)
        which = nodeid if len(nodeids) == 1 else f"{nodeid} and {len(nodeids) - 1} more of its fixture"
        where = f"{which} (alone, with {len(tried) - 1} others of its file, {time.monotonic() - began_s:.0f} s)"
        # A status of 0 alone says nothing: the tests may have been skipped.
        if status != 0 or not {f"PASSED {each}" for each in nodeids} <= set(output.splitlines()):
            self._lines += [f"FAILED AGAIN  {where}; first: {said}", *output.splitlines()[-60:]]
            return False
        standstill_s = _properties(first).get(STANDSTILL, 0.0)
        what = "FLAKY" if standstill_s >= _MIN_STANDSTILL_S else "FLAKY, SUSPECT (no standstill explains it)"
        row = flaky_record.Row(
            when=datetime.now(UTC).date(),
            commit=_commit(self._config.rootpath),
            test=nodeid,
            said=said,
            standstill_s=standstill_s,
        )
        flaky_record.append(self._record, row)
        self._lines += [f"{what}  {where}; first: {said}", f"  for {self._record.name}: {row.line()}"]
        if before := self._before(nodeid):
            self._lines.append(f"  before it in its process: {', '.join(before)}")
        # One that is listed already, and that nobody has mended, is no accident any more.
        listed = flaky_record.faults(flaky_record.read(self._record))
        self._lines += [f"FAILED  {each}: mend it" for each in listed]
        return not listed

    def _before(self, nodeid: str) -> list[str]:
        """The last files that its worker ran before that of this test, whose leftovers it may have met."""
        files = list(self._order)
        ran = [each for each in files if self._workers[each] == self._workers[_file(nodeid)]]
        return ran[: ran.index(_file(nodeid))][-_NUM_BEFORE:]

    def _run(self, nodeids: list[str]) -> tuple[int, str]:
        # pytest's variables are for this process: options of the user, and which worker it is.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", "-n0", "-q", "-rp", "--color=no", "--tb=short"]
        command += ["-p", "no:cacheprovider"]
        # A file and no pipe: what the tests leave running may hold that open, and what was said of a hang is wanted.
        with tempfile.TemporaryFile() as said:
            try:
                status = subprocess.run(
                    [*command, f"--rootdir={self._config.rootpath}", *nodeids],
                    cwd=self._config.rootpath,
                    env=environment,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    timeout=_LIMIT_S,
                    check=False,
                ).returncode
                late = ""
            except subprocess.TimeoutExpired:
                status, late = 124, f"\nit did not end within {_LIMIT_S:g} s"
            said.seek(0)
            return status, said.read().decode(errors="replace") + late

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints what was tried, and how that ended."""
        if self._lines:
            terminalreporter.section("once more, alone")
            for line in self._lines:
                terminalreporter.write_line(line)


def _final_reason(report: pytest.TestReport) -> str | None:
    """Why a second try cannot excuse a failure; None = it can."""
    text = str(report.longrepr)
    if report.when not in ("setup", "call", "teardown"):
        return "its process crashed"  # xdist reports it so
    if "from pytest-timeout" in text:
        return "it hung"
    if report.when == "teardown":
        return "it left something behind that its end could not undo"
    reason = _properties(report).get(_FINAL)
    return None if reason is None else str(reason)


def _all(found: "pytest.ExceptionInfo[BaseException]") -> list[BaseException]:
    """An exception, those of its group, as of a TaskGroup, and those that led to it."""
    errors = [found.value]
    for error in errors:  # grows while it is walked
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        further = (*inner, error.__cause__, error.__context__)
        errors += [each for each in further if each is not None and not any(each is known for known in errors)]
    return errors


def _properties(of: pytest.Item | pytest.TestReport) -> dict[str, Any]:
    return {str(name): value for name, value in of.user_properties}


def _file(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else f"{Path(crash.path).name}:{crash.lineno}: {crash.message}"
    lines = text.strip().splitlines() or ["it said nothing"]
    return (lines[-1] if crash is None else lines[0])[:300]


def _commit(root: Path) -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"
