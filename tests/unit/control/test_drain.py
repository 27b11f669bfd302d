"""The end of a daemon: one deadline for all that runs, and nothing sampled from weights of no version."""

import asyncio
from dataclasses import dataclass, field

import pytest

from genserve.control.conditions import EngineCondition, Phase
from genserve.control.drain import Drain
from genserve.control.membership import RouterRun
from genserve.control.state import ServedWeights
from genserve.engine.types import PauseMode
from genserve.errors import DrainingError, EngineDeadError
from genserve.process.signals import Stopped
from tests.support.patience import STEP_S, turns, until
from tests.support.phases import enter_phase
from tests.support.scripted_engine import Gate
from tests.unit.control.conftest import Rig

pytestmark = pytest.mark.usefixtures("leaping_clock")


@dataclass
class Weights:
    """Changes of weights that end when told to. `keeps_served`: as a keeper, it has the served version on its disk."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    keeps_served: bool = True

    async def close(self) -> None:
        await self.ended.wait()


@dataclass
class Http:
    """A server whose answers end when told to. `refuses`: whether it takes requests no more."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    refuses: bool = False

    async def wait_ended(self) -> None:
        """Waits until it is told to."""
        await self.ended.wait()

    def refuse(self) -> None:
        self.refuses = True


@pytest.fixture
def updates() -> Weights:
    weights = Weights()
    weights.ended.set()
    return weights


@pytest.fixture
def pushes() -> Weights:
    weights = Weights()
    weights.ended.set()
    return weights


@pytest.fixture
def drain(rig: Rig, updates: Weights, pushes: Weights) -> Drain:
    return Drain(rig.engine, rig.board, rig.pauses, updates, pushes)


async def test_an_idle_daemon_drains_at_once(rig: Rig, drain: Drain) -> None:
    """And tells so."""
    drained = await drain.run(Stopped(), 60.0)
    assert (drained.in_order, drained.cut) == (True, [])
    assert rig.board.phase is Phase.DRAINING


async def test_frozen_requests_are_resumed_to_finish(rig: Rig, drain: Drain) -> None:
    """Whoever holds leases: nobody else would resume them."""
    await rig.pause(ttl_s=None)
    rig.engine.idle.clear()
    draining = asyncio.create_task(drain.run(Stopped(), 60.0))
    await until(lambda: rig.engine.running)
    assert not draining.done()
    rig.engine.idle.set()
    assert (await draining).cut == []
    assert rig.engine.calls == ["pause keep reuse", "resume"]


async def test_requests_that_do_not_finish_in_time_are_ended(rig: Rig, drain: Drain) -> None:
    """Their clients get what there is, with reason ABORTED."""
    rig.engine.idle.clear()
    drained = await drain.run(Stopped(), 60.0)
    assert drained.in_order
    assert drained.cut == ["aborted requests that did not finish in time: 1"]
    assert rig.engine.calls == ["abort"]


@pytest.mark.parametrize(("phase", "condition"), [(Phase.TAINTED, "TAINTED"), (Phase.SLEEPING, "ASLEEP")])
async def test_an_engine_that_may_not_run_is_not_resumed(rig: Rig, drain: Drain, phase: Phase, condition: str) -> None:
    """Its requests are ended at once: they could not finish."""
    await rig.pause()
    rig.engine.idle.clear()
    enter_phase(rig.board, phase)
    drained = await drain.run(Stopped(), 60.0)
    assert drained.cut == [f"aborted requests of an engine that is {condition}: 1"]
    assert not rig.engine.running
    assert rig.engine.calls == ["pause keep reuse", "abort"]


async def test_a_commit_that_taints_while_draining_ends_the_requests(rig: Rig, drain: Drain, pushes: Weights) -> None:
    """They stand still by then, and stay so."""
    await rig.pause()
    rig.engine.idle.clear()
    pushes.ended.clear()
    draining = asyncio.create_task(drain.run(Stopped(), 60.0))
    await until(lambda: rig.engine.running)
    assert not draining.done()
    rig.board.enter(EngineCondition.TAINTED)
    pushes.ended.set()
    assert (await draining).cut == ["aborted requests of an engine that is TAINTED: 1"]


async def test_a_pause_that_waits_for_requests_does_not_hold_the_drain_up(rig: Rig, drain: Drain) -> None:
    """It is refused, and the requests finish."""
    gate = rig.engine.gates["pause"] = Gate()
    pausing = asyncio.create_task(rig.pause(PauseMode.WAIT, timeout_s=60.0))
    await gate.reached.wait()
    assert (await asyncio.wait_for(drain.run(Stopped(), 600.0), STEP_S)).cut == []
    with pytest.raises(DrainingError):
        await pausing


async def test_a_push_that_does_not_end_is_given_up_at_the_deadline(rig: Rig, drain: Drain, pushes: Weights) -> None:
    """With the requests that run: one deadline for both."""
    pushes.ended.clear()
    rig.engine.idle.clear()
    drained = await drain.run(Stopped(), 60.0)
    assert drained.in_order
    assert drained.cut == [
        "gave up a push, which did not end in time",
        "aborted requests that did not finish in time: 1",
    ]


async def test_drain_reports_an_engine_that_has_died(rig: Rig, drain: Drain) -> None:
    """Nothing is left to wait for, and it was no end in order."""
    enter_phase(rig.board, Phase.DEAD)
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(drain.run(Stopped(), 600.0), STEP_S)


async def test_what_is_given_up_does_not_go_on_later(rig: Rig, drain: Drain, pushes: Weights) -> None:
    """A push that ends after all finds nobody who would wait for requests."""
    pushes.ended.clear()
    draining = asyncio.create_task(drain.run(Stopped(), 60.0))
    await turns()
    assert "drain" in {task.get_name() for task in asyncio.all_tasks()}
    await draining
    await turns()
    assert "drain" not in {task.get_name() for task in asyncio.all_tasks()}


async def test_an_update_that_hangs_is_no_end_in_order(rig: Rig, drain: Drain, updates: Weights) -> None:
    """The live weights are half received, and nothing can undo that."""
    updates.ended.clear()
    drained = await drain.run(Stopped(), 60.0)
    assert not drained.in_order
    assert drained.cut == ["gave up a weight update, which did not end in time"]


async def test_an_engine_that_is_busy_for_long_does_not_hold_the_drain_up(rig: Rig, drain: Drain) -> None:
    """The resume cannot be cancelled; it is left."""
    await rig.pause()
    gate = rig.engine.gates["resume"] = Gate()
    drained = await drain.run(Stopped(), 60.0)
    assert drained.cut == ["gave up a pause, which did not end in time"]
    gate.open.set()


async def test_answers_over_http_end_before_the_drain_does(rig: Rig, updates: Weights, pushes: Weights) -> None:
    """They may still be sent when the engine has nothing more to do. No new request is taken from the beginning."""
    http = Http()
    updates.ended.clear()
    draining = asyncio.create_task(Drain(rig.engine, rig.board, rig.pauses, updates, pushes, http).run(Stopped(), 60.0))
    await turns()
    assert http.refuses
    updates.ended.set()
    await turns()
    assert not draining.done()
    http.ended.set()
    assert (await draining).cut == []


async def test_answers_over_http_are_cut_off_at_the_deadline(rig: Rig, updates: Weights, pushes: Weights) -> None:
    """As those over gRPC, and it is told."""
    drained = await Drain(rig.engine, rig.board, rig.pauses, updates, pushes, Http()).run(Stopped(), 60.0)
    assert drained.in_order
    assert drained.cut == ["gave up answers over HTTP, which did not end in time"]


async def test_what_is_served_is_kept_before_the_drain_ends(rig: Rig, updates: Weights, pushes: Weights) -> None:
    """When all pushes have ended: none follows it. At the deadline it is left, and that is told."""
    keeper = Weights()
    drain = Drain(rig.engine, rig.board, rig.pauses, updates, pushes, keeper=keeper)
    draining = asyncio.create_task(drain.run(Stopped(), 60.0))
    await turns()
    assert not draining.done()
    keeper.ended.set()
    assert (await draining).cut == []


async def test_a_disk_that_hangs_does_not_hold_the_drain_up(rig: Rig, updates: Weights, pushes: Weights) -> None:
    """It is told."""
    keeper = Weights()
    drained = await Drain(rig.engine, rig.board, rig.pauses, updates, pushes, keeper=keeper).run(Stopped(), 60.0)
    assert drained.in_order
    assert len(drained.cut) == 1 and "--keep-committed" in drained.cut[0]


@pytest.mark.parametrize("keeps_served", [True, False])
async def test_what_could_not_be_kept_is_handed_over(
    rig: Rig, updates: Weights, pushes: Weights, *, keeps_served: bool
) -> None:
    """The disk was full, say: then nothing brings it back after a restart."""
    rig.board.tell_served(lambda: ServedWeights("push 3", "", ""))
    keeper = Weights(keeps_served=keeps_served)
    keeper.ended.set()
    drain = Drain(rig.engine, rig.board, rig.pauses, updates, pushes, keeper=keeper)
    with rig.board.membership.looked_after(RouterRun("router", "here")):
        draining = asyncio.create_task(drain.run(Stopped(), 60.0))
        await turns()
        assert draining.done() is keeps_served
        rig.board.membership.let_go("router")
        assert (await draining).cut == []
