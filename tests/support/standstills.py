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


def add_option(parser: pytest.Parser) -> None:
    """`--standstills`."""
    parser.addoption(
        "--standstills", metavar="SEED[-SEED]", help="run each test with each seed; its event loop stands still once"
    )


def register(config: pytest.Config) -> None:
    """The plugin, if it is asked for. Raises UsageError for seeds that are none."""
    if (option := config.option.standstills) is None:
        return
    first, _, last = option.partition("-")
    try:
        seeds = range(int(first), int(last or first) + 1)
    except ValueError:
        seeds = range(0)
    if not seeds:
        raise pytest.UsageError(f"--standstills {option}: neither a seed nor FIRST-LAST")
    config.pluginmanager.register(Standstills(seeds))


class Standstills:
    """A plugin. The same seed stops the same tests at the same turns.

    Each test runs with each seed, one after the other, so that several seeds take one collection of all tests. One that
    has no event loop can only stand still in its process: it runs with the first and the last seed.
    """

    def __init__(self, seeds: range) -> None:
        self._seeds = seeds
        self._seed = seeds[0]
        self._is_repeating = False
        self._is_without_loop = False
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

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Lets pytest run the test once for each seed: each time with a time limit and evidence of its own."""
        if self._is_repeating:
            return None
        self._is_repeating = True
        try:
            *others, last = self._seeds
            for seed in others:
                # Fixtures of its module and above are kept for the next time: they are what the test's parent needs.
                self._run(item, item.parent, seed)
                if item.session.shouldfail or item.session.shouldstop:
                    return True
                if self._is_without_loop:
                    break
            self._run(item, nextitem, last)
        finally:
            self._is_repeating = False
        return True

    def _run(self, item: pytest.Item, next_node: pytest.Item | pytest.Collector | None, seed: int) -> None:
        self._seed, self._report, self._is_without_loop = seed, "none in a fixture", False
        item._report_sections.clear()  # what the test has written before
        item.user_properties.clear()
        item.ihook.pytest_runtest_protocol(item=item, nextitem=next_node)

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
            self._is_without_loop = not self._turn

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Adds to the report of a failed test when its event loop stood still."""
        report = yield
        if report.failed:
            report.sections.append(("standstill", f"{self._report}, seed {self._seed}"))
        return report
