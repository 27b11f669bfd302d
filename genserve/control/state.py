"""The engine's state as the outside sees it, and the news that it changed.

Owns the phase: which of the daemon's own conditions (draining, applying, tainted, dead) holds, above what the leases
say.
"""

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from genserve.control.leases import PauseLease
from genserve.engine.base import Engine


class Phase(enum.Enum):
    """What the engine is doing; the values are the names of genserve.v1.Phase without their prefix."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    APPLYING = "APPLYING"
    TAINTED = "TAINTED"
    SLEEPING = "SLEEPING"
    DRAINING = "DRAINING"
    DEAD = "DEAD"


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the control plane tells of the engine with every answer."""

    instance_id: str
    weight_version: int
    phase: Phase
    pauses: Sequence[PauseLease]
    running_requests: int
    waiting_requests: int


class StateBoard:
    """Composes the state and wakes those who watch it."""

    def __init__(self, engine: Engine, active_leases: Callable[[], Sequence[PauseLease]], instance_id: str) -> None:
        self._engine = engine
        self._active_leases = active_leases
        self._instance_id = instance_id
        self._overriding: Phase | None = Phase.STARTING
        self._changed = asyncio.Event()

    @property
    def phase(self) -> Phase:
        """What the engine is doing."""
        if self._overriding is not None:
            return self._overriding
        return Phase.PAUSED if self._active_leases() else Phase.RUNNING

    def state(self) -> EngineState:
        """The state now."""
        load = self._engine.load()
        return EngineState(
            instance_id=self._instance_id,
            weight_version=self._engine.weight_version,
            phase=self.phase,
            pauses=tuple(self._active_leases()),
            running_requests=load.running,
            waiting_requests=load.waiting,
        )

    def enter(self, phase: Phase | None) -> None:
        """Sets a phase that overrides what the leases say; None gives it back to them. Dead is for ever, and draining
        gives way to dead alone."""
        if self._overriding is Phase.DEAD or (self._overriding is Phase.DRAINING and phase is not Phase.DEAD):
            return
        self._overriding = phase
        self.notify()

    def notify(self) -> None:
        """Wakes everyone who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self) -> None:
        """Returns when something changed after the call."""
        await self._changed.wait()
