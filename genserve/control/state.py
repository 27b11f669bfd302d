"""The engine's state as clients see it, and notification of its changes.

Owns the conditions of the engine and of the daemon, the parts that are asleep, and the daemon's place in a fleet.
`conditions` and `membership` have the rules.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

from genserve.aio import Change
from genserve.control.asleep import Asleep
from genserve.control.conditions import RULES, DaemonCondition, EngineCondition, Phase, condition_of, phase_of
from genserve.control.leases import PauseLease
from genserve.control.membership import Membership
from genserve.control.waits import LastPause
from genserve.engine.protocol import Engine
from genserve.engine.types import Load
from genserve.errors import EngineDeadError, EngineTaintedError

_IDLE = Load(0, 0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Startup:
    """What the daemon does between its first answer and its first request. `step`: what it does now, for people,
    since `step_begin_s`; the start began at `begin_s`. Unix times."""

    step: str
    step_begin_s: float
    begin_s: float

    def described(self, now_s: float) -> str:
        """The step, and how long it and the steps before have taken, for people."""
        step_s, all_s = (max(0.0, now_s - each) for each in (self.step_begin_s, self.begin_s))
        since = f" ({all_s:.0f} s since the start)" if self.begin_s != self.step_begin_s else ""
        return f"{self.step}, for {step_s:.0f} s{since}"

    def then(self, step: str, now_s: float) -> Self:
        """After `step` has begun. One that goes on, on another rank say, began when it first did."""
        return self if step == self.step else replace(self, step=step, step_begin_s=now_s)


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """What tells served weights of one version apart. `push_id`: of the push that brought them, "" = those of the
    checkpoint, or of vLLM's own transfer. `content_digest`: as in PushHeader, "" = not known. `base_digest`: tells the
    checkpoint apart that the daemon has started with, "" = not known."""

    push_id: str = ""
    content_digest: str = ""
    base_digest: str = ""


@dataclass(frozen=True, slots=True)
class EngineState:
    """The state of the engine in every answer of the control plane. `asleep_tags`: the parts that are asleep.
    `weights_discarded`: a sleep of level 2 dropped the weights, and no version was applied since. `startup`: what the
    daemon does before it serves, None afterwards. `fleet_epoch`: of the record of the daemon's fleet, 0 = none.
    `router_address`: of the router that looks after the daemon, "" = none does."""

    instance_id: str
    weight_version: int
    phase: Phase
    pauses: Sequence[PauseLease]
    load: Load
    asleep_tags: Sequence[str] = ()
    weights_discarded: bool = False
    startup: Startup | None = None
    served: ServedWeights = ServedWeights()
    fleet_epoch: int = 0
    router_address: str = ""


class StateBoard:
    """Composes the state and notifies its watchers. `engine` is None until `attach`."""

    def __init__(
        self,
        engine: Engine | None,
        active_leases: Callable[[], Sequence[PauseLease]],
        instance_id: str,
        daemon: DaemonCondition = DaemonCondition.SERVING,
    ) -> None:
        self._engine = engine
        self._active_leases = active_leases
        self._instance_id = instance_id
        self._entered: EngineCondition | None = None
        self._ended = False
        self.daemon_condition = daemon
        """Whether the daemon starts, serves or drains."""
        self.asleep = Asleep()
        """The parts of the engine that are asleep."""
        self._asleep_tags: Sequence[str] = ()
        self.answers = True
        """Whether the engine answers its heartbeat, as far as it has one."""
        self.changed = Change()
        """Notified at each change of the state, and of what else a status shows."""
        self.membership = Membership(self.notify)
        """The fleet that the daemon belongs to."""
        self._startup: Startup | None = None
        self._served: Callable[[], ServedWeights] = ServedWeights
        self._callbacks: list[Callable[[], None]] = []
        # Values, because every request reads them. Each change of what they follow from ends with `notify`.
        self.engine_condition = condition_of(None, frozenset(), is_paused=bool(active_leases()))
        """What the engine is doing, independent of the daemon's condition."""
        self.phase = phase_of(self.engine_condition, daemon)
        """The phase that clients see."""

    @property
    def is_serving(self) -> bool:
        """Whether health says SERVING: requests are accepted, though they may have to wait, and the engine answers."""
        return self.answers and RULES[self.phase].serves

    @property
    def weight_version(self) -> int:
        """Version of the weights served."""
        return 0 if self._engine is None else self._engine.weights.version

    @property
    def cause_of_death(self) -> str:
        """Why the engine is dead, for people; "" while it lives, or where nobody knows."""
        return "" if self._engine is None else self._engine.cause_of_death

    @property
    def last_pause(self) -> LastPause | None:
        """The pause that ends last, None if nobody pauses the engine."""
        return LastPause.of(self._active_leases())

    @property
    def startup(self) -> Startup | None:
        """What the daemon does before it serves; None afterwards, and before its first step."""
        return self._startup if self.phase is Phase.STARTING else None

    def state(self) -> EngineState:
        """The state now."""
        return EngineState(
            instance_id=self._instance_id,
            weight_version=self.weight_version,
            phase=self.phase,
            pauses=tuple(self._active_leases()),
            load=_IDLE if self._engine is None else self._engine.load(),
            asleep_tags=self._asleep_tags,
            weights_discarded=self.asleep.weights_lost,
            startup=self._startup if self.phase is Phase.STARTING else None,
            served=self._served(),
            fleet_epoch=self.membership.record.epoch,
            router_address=self.membership.router_address,
        )

    def attach(self, engine: Engine) -> None:
        """The engine is there."""
        self._engine = engine
        self.notify()

    def tell_served(self, served: Callable[[], ServedWeights]) -> None:
        """From now on the state has what this returns."""
        self._served = served
        self.notify()

    def tell_step(self, step: str, now_s: float) -> None:
        """Records what the daemon does while it starts. `now_s`: Unix time."""
        self._startup = Startup(step, now_s, now_s) if self._startup is None else self._startup.then(step, now_s)
        self.notify()

    def enter(self, condition: EngineCondition | None) -> None:
        """Sets what the engine is doing; None = as the sleep and the leases imply. DEAD is final."""
        if self._entered is not EngineCondition.DEAD:
            self._entered = condition
            self.notify()

    @contextmanager
    def applying(self, if_failed: EngineCondition | None) -> Iterator[None]:
        """Says APPLYING during the block, and never after. An engine that is dead or tainted then says so by the error
        that the block raises; `if_failed` is what any other error leaves."""
        after = if_failed
        self.enter(EngineCondition.APPLYING)
        try:
            yield
            after = None
        except EngineDeadError:
            after = EngineCondition.DEAD
            raise
        except EngineTaintedError:
            after = EngineCondition.TAINTED
            raise
        finally:
            self.enter(after)

    def tell_asleep(self, asleep: Asleep) -> None:
        """Sets the parts that are asleep."""
        self.asleep, self._asleep_tags = asleep, asleep.names
        self.notify()

    def tell_applied(self) -> None:
        """Records that a version was applied to all weights: none are missing after a sleep any more."""
        if self.asleep.weights_lost:
            self.tell_asleep(replace(self.asleep, weights_lost=False))

    def become(self, condition: DaemonCondition) -> None:
        """Sets the daemon's condition. DRAINING is final."""
        if self.daemon_condition is not DaemonCondition.DRAINING:
            self.daemon_condition = condition
            self.notify()

    def tell_answers(self, answers: bool) -> None:
        """Records whether the engine answers its heartbeat. Health says NOT_SERVING while it does not."""
        self.answers = answers
        self.notify()

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more: watchers send the last state and end."""
        return self._ended or self.engine_condition is EngineCondition.DEAD

    def end(self) -> None:
        """Records that the daemon has drained."""
        self._ended = True
        self.notify()

    def notify(self) -> None:
        """Wakes all waiters for a change. To be called when leases have changed as well."""
        is_paused = bool(self._active_leases())
        self.engine_condition = condition_of(self._entered, self.asleep.tags, is_paused=is_paused)
        self.phase = phase_of(self.engine_condition, self.daemon_condition)
        for callback in self._callbacks:
            callback()
        self.changed.notify()

    def call_on_change(self, callback: Callable[[], None]) -> None:
        """Calls `callback` at each change, before its waiters wake up."""
        self._callbacks.append(callback)

    async def wait_change(self) -> None:
        """Returns when something changed after the call."""
        await self.changed.wait()
