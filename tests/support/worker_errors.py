"""Errors of xdist's workers outside of tests. xdist prints them, and may end as a run does that has passed."""

from typing import Any

import pytest


class WorkerErrors:
    """A plugin of the process that receives all reports. A run does not pass if a worker has an error of its own, as in
    a hook of pytest, or dies after its last test. Register it after what may excuse failures."""

    def __init__(self) -> None:
        self._errors: list[str] = []

    def pytest_internalerror(self, excrepr: object) -> None:
        """Also called for an error in a worker."""
        self._errors += str(excrepr).strip().splitlines()[-1:]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker has ended; in order if there is no error."""
        if error:
            self._errors.append(f"worker {node.gateway.id}: {error}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """The last word on how the run ends."""
        if self._errors:
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints them again: the first time they come between the tests."""
        if self._errors:
            terminalreporter.section("errors of workers")
            for error in self._errors:
                terminalreporter.write_line(error)
