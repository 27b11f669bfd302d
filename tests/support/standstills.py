"""Lets the event loop of each test stand still once, at a random turn, as a machine does that runs something else.

A test that fails with it relies on time where order is meant, or shows a race of the product. `scripts/flaky` uses it.
"""

import asyncio
import random
import time
from collections.abc import Generator, Sequence
from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol

STANDSTILL_S: Final = 1.2


def add_option(parser: pytest.Parser) -> None:
    """`--standstills`."""
    parser.addoption(
        "--standstills", metavar="SEED[-SEED]", help="run each test with each seed; its event loop stands still once"
    )


def parse_seeds(option: str) -> range:
    """Of `--standstills`: one, or the first and the last."""
    first, _, last = option.partition("-")
    return range(int(first), int(last or first) + 1)


class Standstills:
    """A plugin. The same seed stops the same tests at the same turns.

    A test with an event loop runs once for each seed, as collecting all tests anew takes as long as many of them.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self._seed = seeds[0]
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

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Runs the test with each seed; without an event loop, with the first and the last alone."""
        *others, last = self._seeds
        for seed in others:
            self._run(item, item.parent, seed)
            if not self._turn or item.session.shouldfail or item.session.shouldstop:
                break
        if not item.session.shouldfail and not item.session.shouldstop:
            self._run(item, nextitem, last)
        return True

    def _run(self, item: pytest.Item, next_node: pytest.Item | pytest.Collector | None, seed: int) -> None:
        """As pytest's own hook does: what the next node needs as well, such as fixtures of a module, is kept for it."""
        self._seed, self._turn = seed, 0
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        runtestprotocol(item, nextitem=next_node)  # type: ignore[arg-type]  # whose parents are all that counts
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

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
