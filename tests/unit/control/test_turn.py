"""The turn: the next one drives the engine when it has ended what the one before asked for."""

import asyncio
from types import SimpleNamespace

import pytest

from genserve.control import turn
from genserve.control.conditions import Phase
from genserve.control.turn import remaining_s, uninterrupted
from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import DeadlineError, DrainingError
from tests.support.patience import STEP_S, turns
from tests.support.phases import enter_phase
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.control.conftest import Rig

pytestmark = pytest.mark.usefixtures("leaping_clock")


async def test_a_turn_lasts_until_the_engine_has_ended_what_its_client_gave_up(rig: Rig) -> None:
    """A client asks for digests and goes away, and EngineCore reads on: a pause waits for it, instead of timing out in
    the engine and failing to be undone, which would end the daemon."""
    reading = asyncio.Event()

    async def digests() -> None:
        async with rig.pauses.undisturbed(60.0, "the reading of digests"):
            rig.engine.free.clear()
            reading.set()
            await asyncio.Event().wait()

    asking = asyncio.create_task(digests())
    await reading.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with refuses(DeadlineError, says="the reading of digests kept the engine for 60 s"):
        await rig.pause(timeout_s=60.0)
    pausing = asyncio.create_task(rig.pause())
    await turns()
    assert rig.engine.calls == []
    rig.engine.free.set()
    await pausing
    assert rig.engine.calls == ["pause keep reuse"]
    assert not rig.background.done()


async def test_a_pause_is_given_up_on_time_though_its_undoing_takes_longer(rig: Rig) -> None:
    """Engines in lockstep resume when the pause has taken hold, and not before: the caller does not wait for that, the
    next one does."""
    rig.engine.hangs.add("pause")
    resuming = rig.engine.gates["resume"] = Gate()
    began_s = asyncio.get_running_loop().time()
    with refuses(DeadlineError, says="3 sequences still run"):
        await rig.pause(PauseMode.WAIT, timeout_s=60.0)
    assert asyncio.get_running_loop().time() - began_s < 63.0
    assert rig.leases.active == ()
    rig.engine.hangs.clear()
    second = asyncio.create_task(rig.pause())
    await turns()
    assert rig.engine.calls == ["pause wait reuse", "resume"]
    resuming.open.set()
    await second
    assert rig.engine.calls == ["pause wait reuse", "resume", "pause keep reuse"]
    assert not rig.background.done()


async def test_a_pause_that_waits_is_given_up_when_the_daemon_drains(rig: Rig) -> None:
    """DRAINING for its caller, and the engine runs: what is left may finish."""
    pausing = rig.engine.gates["pause"] = Gate()
    waiting = asyncio.create_task(rig.pause(PauseMode.WAIT, timeout_s=60.0))
    behind = asyncio.create_task(rig.pause(timeout_s=60.0))
    await pausing.reached.wait()
    enter_phase(rig.board, Phase.DRAINING)
    rig.pauses.cancel_pending()
    for each in (waiting, behind):
        with pytest.raises(DrainingError):
            await asyncio.wait_for(each, STEP_S)
    assert rig.engine.calls == ["pause wait reuse", "resume"]
    assert rig.engine.running


async def test_a_hold_that_waits_is_given_up_when_the_daemon_drains(rig: Rig) -> None:
    """A push with WAIT as well."""
    pausing = rig.engine.gates["pause"] = Gate()

    async def push() -> None:
        async with rig.pauses.hold(PauseMode.WAIT, KvPolicy.REUSE, timeout_s=60.0):
            pytest.fail("entered")

    pushing = asyncio.create_task(push())
    await pausing.reached.wait()
    enter_phase(rig.board, Phase.DRAINING)
    rig.pauses.cancel_pending()
    with pytest.raises(DrainingError):
        await asyncio.wait_for(pushing, STEP_S)
    assert rig.engine.running


async def test_uninterrupted_work_is_done_before_the_cancellation_is_raised() -> None:
    """Cancelling waits; it is not swallowed, and the work's own error is its cause."""
    gate = Gate()

    async def work() -> None:
        gate.reached.set()
        await gate.open.wait()
        raise RuntimeError("broken")

    task = asyncio.create_task(uninterrupted(work()))
    await gate.reached.wait()
    task.cancel()
    await turns()
    assert not task.done()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await task
    assert isinstance(cancelled.value.__cause__, RuntimeError)


def test_a_step_for_which_no_time_is_left_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it: nothing has changed by then."""
    monkeypatch.setattr(turn, "time", SimpleNamespace(monotonic=lambda: 100.0))
    assert remaining_s(100.25, "prepare") == 0.25
    for deadline_s in (100.0, 99.75, 0.0):
        with refuses(DeadlineError, says="prepare"):
            remaining_s(deadline_s, "prepare")


async def test_the_caller_is_told_that_a_pause_could_not_be_undone(rig: Rig) -> None:
    """The daemon ends of it: what made the pause fail is of no use any more."""
    rig.engine.fails |= {"pause": RuntimeError("no pause"), "resume": RuntimeError("no way back")}
    with pytest.raises(RuntimeError, match="no way back"):
        await rig.pause()
    with pytest.raises(RuntimeError, match="no way back"):
        await rig.background
