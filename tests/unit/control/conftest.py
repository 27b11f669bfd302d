"""A pause controller on an engine that fails and hangs where the test says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from genserve.control.leases import LeaseTable, PauseLease
from genserve.control.pause import PauseController
from genserve.control.sleep import SleepController
from genserve.control.state import StateBoard
from genserve.engine.types import KvPolicy, PauseMode
from tests.support.clocks import leaping_clock
from tests.support.scripted_engine import ScriptedEngine


class Resident:
    """The bytes of the served version; `fails` raises instead of applying them. `waits_s`: how long each call would
    have waited for the push that is applied."""

    def __init__(self, engine: ScriptedEngine, board: StateBoard) -> None:
        self._engine = engine
        self._board = board
        self.fails: Exception | None = None
        self.waits_s: list[float] = []
        self.is_between = False

    @asynccontextmanager
    async def between_pushes(self, timeout_s: float) -> AsyncIterator[None]:
        assert not self.is_between, "it would wait for itself"
        self.waits_s.append(timeout_s)
        self.is_between = True
        try:
            yield
        finally:
            self.is_between = False

    async def restore_dropped(self) -> None:
        if self.fails is not None:
            raise self.fails
        if not self.is_between:
            self._engine.misuses.append("restored beside a push")
        if self._engine.running:
            self._engine.misuses.append("restored while it ran")
        await self._engine.step("restore", "restore", 1.0)
        self._engine.live = {"w": b"restored"}
        self._board.tell_applied()


@dataclass
class Rig:
    """A controller on a scripted engine, with its background task."""

    engine: ScriptedEngine
    leases: LeaseTable
    board: StateBoard
    pauses: PauseController
    sleeps: SleepController
    resident: Resident
    background: "asyncio.Task[None]"

    async def pause(self, mode: PauseMode = PauseMode.KEEP, **options: Any) -> PauseLease:
        options = {"holder": "t", "ttl_s": 60.0, "timeout_s": 60.0, "kv_policy": KvPolicy.REUSE} | options
        return await self.pauses.pause(mode, **options)


@pytest.fixture(name="leaping_clock")
async def time_leaps() -> AsyncIterator[None]:
    """A second in which an engine may undo something does not pass while the machine stands still."""
    with leaping_clock():
        yield


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    loop = asyncio.get_running_loop()
    engine, leases = ScriptedEngine(), LeaseTable(lambda: loop.time())  # also when a test sets it forward
    board = StateBoard(engine, lambda: leases.active, "test")
    pauses = PauseController(engine, leases, board)
    resident = Resident(engine, board)
    sleeps = SleepController(engine, pauses, board, resident)
    background = asyncio.create_task(pauses.run())
    yield Rig(engine, leases, board, pauses, sleeps, resident, background)
    background.cancel()
    await asyncio.wait({background})
    assert engine.misuses == []
