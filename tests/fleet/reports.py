"""Replicas that tell their state, and time in which some of them do not."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

from genserve.fleet.fleet import Fleet
from genserve.fleet.upstream import Upstream
from tests.support.clocks import AdvancedClock, advanced_clock
from tests.support.patience import turns, until

_PARTS: Final = 4
"""Of genserve.aio: a clock that leaps is a process that stood still, and ends one of them."""


async def until_reported(fleet: Fleet, times: int = 2) -> None:
    """Each replica that answers has told its state so often since. What the router had to tell one of them before was
    sent on the same connection, and what it does about the states has begun."""
    for _ in range(times):
        await _until_told(fleet.answering)
    await turns()


async def time_passes(clock: AdvancedClock, fleet: Fleet, seconds: float, silent: Collection[str] = ()) -> None:
    """All replicas but those at these addresses say something meanwhile."""
    others = [each for address, each in fleet.upstreams.items() if address not in silent]
    for _ in range(_PARTS):
        await clock.advance(seconds / _PARTS)
        await _until_told(others)


async def silence_passes(clock: AdvancedClock, fleet: Fleet, *silent: str) -> None:
    """So much time passes that the replicas at these addresses are lost: after one silence they are called, if they
    tell their states though they hear nothing, and after another one that call has no answer."""
    lost = [fleet.upstreams[address].member for address in silent]
    for _ in range(3):
        await time_passes(clock, fleet, fleet.settings.silence_s, silent)
        if all(member.failure for member in lost):
            break


async def _until_told(replicas: Collection[Upstream]) -> None:
    before = [(each.member, each.member.engine) for each in replicas]
    await until(lambda: all(member.engine is not told for member, told in before))


@asynccontextmanager
async def clock_of_leases() -> AsyncIterator[AdvancedClock]:
    """As `advanced_clock`, and the wall clock goes with it: a router compares it with the ends of leases."""
    wall_clock = time.time
    with advanced_clock() as clock, pytest.MonkeyPatch.context() as patched:
        not_ahead_s = clock.now_s() - time.perf_counter()
        patched.setattr(time, "time", lambda: wall_clock() + clock.now_s() - time.perf_counter() - not_ahead_s)
        yield clock


def entered(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str) -> asyncio.Event:
    """Set when a coroutine method of `owner` is called next."""
    real, called = getattr(owner, method), asyncio.Event()

    async def call(*args: Any, **options: Any) -> Any:
        called.set()
        return await real(*args, **options)

    monkeypatch.setattr(owner, method, call)
    return called
