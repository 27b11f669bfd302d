"""Lets the event loop of each test stand still once, at a random turn, as a machine does that runs something else.

A test that fails with it relies on time where order is meant, or shows a race of the product. `scripts/flaky` uses it.
"""

import asyncio
import random
import time
from collections.abc import Generator
from typing import Any, Final

import pytest

STANDSTILL_S: Final = 1.2


class Standstills:
    """A plugin. The same seed stops the same tests at the same turns."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._turn = 0
        self._stop_at: int | None = None  # None: no test runs, or it stood still already
        self._report = ""
        loop: Any = asyncio.base_events.BaseEventLoop
        run_once = loop._run_once

        def stopping(each: Any) -> None:
            self._take_turn()
            run_once(each)

        loop._run_once = stopping  # the one place where asyncio takes a turn; it offers no hook

    def _take_turn(self) -> None:
        if self._stop_at is None:
            return
        self._turn += 1
        if self._turn >= self._stop_at:
            self._stop_at = None
            time.sleep(STANDSTILL_S)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Chooses the turn: mostly an early one, as most tests take few, and sometimes a late one."""
        rng = random.Random(f"{self._seed}/{item.nodeid}")
        self._turn, self._stop_at = 0, int(rng.paretovariate(0.6)) + rng.randrange(25)
        try:
            return (yield)
        finally:
            stood_still = self._stop_at is None
            self._report = f"at turn {self._turn}" if stood_still else f"none: it ended after {self._turn} turns"
            self._stop_at = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Adds to the report of a failed test when its event loop stood still."""
        report = yield
        if report.failed and report.when != "setup":
            report.sections.append(("standstill", f"{self._report}, seed {self._seed}"))
        return report
