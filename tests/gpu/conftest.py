"""What a run on a GPU tells its user: what to send when something failed, and how much was not tried without one."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support import daemon_process
from tests.support.gpu_issue import what_to_send

_START_TIMEOUT_S = 600.0


@pytest.fixture(autouse=True)
def slow_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled when they are used for the first time."""
    monkeypatch.setattr(daemon_process, "START_TIMEOUT_S", _START_TIMEOUT_S)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Adds to the report of a failed test what its user should send."""
    report = yield
    if report.failed and Path(__file__).parent in item.path.parents:
        directory = getattr(item, "funcargs", {}).get("tmp_path")
        report.sections.append(("What to send", what_to_send(item.nodeid, directory)))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many tests of this directory were not tried."""
    skipped = [each for each in terminalreporter.getreports("skipped") if "tests/gpu/" in each.nodeid]
    if skipped:
        terminalreporter.write_line(f"tests/gpu: {len(skipped)} were skipped, and say nothing about GPUs (-rs: why)")
