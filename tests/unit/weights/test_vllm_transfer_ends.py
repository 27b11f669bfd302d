"""How an update through vLLM's own transfer ends: at a shutdown, without anything received, and under a hostile id."""

import asyncio

import pytest

from genserve.control.asleep import SleepDepth
from genserve.control.conditions import EngineCondition, Phase
from genserve.engine.types import PauseMode
from genserve.errors import DrainingError, EngineTaintedError, GenserveError, InvalidFieldError, PushRolledBackError
from genserve.weights.vllm_transfer import UpdateOptions
from tests.support.clocks import advanced_clock
from tests.support.patience import turns, until
from tests.support.phases import enter_phase
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import Rig, header, tensors
from tests.unit.weights.transfers import HALF, finish


@pytest.fixture
def updating(rig: Rig) -> Rig:
    """With a backend."""
    rig.engine.backend = "scripted"
    return rig


async def test_a_daemon_that_shuts_down_undoes_an_update(updating: Rig) -> None:
    """What is left to drain goes on under the version before; a new update is refused."""
    await updating.transfers.start(UpdateOptions())
    await updating.transfers.update("", HALF, 60.0)
    enter_phase(updating.board, Phase.DRAINING)
    await updating.transfers.close()
    assert (updating.engine.live, updating.engine.running) == (tensors(0), True)
    with pytest.raises(DrainingError):
        await updating.transfers.start(UpdateOptions())


async def test_closing_waits_for_a_call_that_is_under_way_and_may_be_given_up(updating: Rig) -> None:
    """The update goes on then."""
    gate = updating.engine.gates["transfer_update"] = Gate()
    await updating.transfers.start(UpdateOptions())
    receiving = asyncio.create_task(updating.transfers.update("", HALF, 60.0))
    await gate.reached.wait()
    closing = asyncio.create_task(updating.transfers.close())
    await turns()
    assert closing.cancel(), "it has not waited"
    await asyncio.wait({closing})
    gate.open.set()
    await receiving
    await finish(updating)


async def test_shutdown_samples_nothing_from_weights_without_a_version(updating: Rig) -> None:
    """What cannot be undone stands still; whoever drains ends the requests."""
    updating.engine.fails["prepare_weights"] = GenserveError("no")
    await updating.transfers.start(UpdateOptions())
    await updating.transfers.update("", HALF, 60.0)
    enter_phase(updating.board, Phase.DRAINING)
    await updating.transfers.close()
    await updating.pauses.resume("", force=True)
    assert not updating.engine.running
    assert updating.board.engine_condition is EngineCondition.TAINTED


async def test_an_update_that_received_nothing_is_refused_and_undone(updating: Rig) -> None:
    """It would be a new version without new weights. What was live is live, also where no bytes are resident: nothing
    has to be restored."""
    await updating.transfers.start(UpdateOptions())
    await updating.transfers.update("", HALF, 60.0)
    await finish(updating)
    live = updating.engine.live
    started = await updating.transfers.start(UpdateOptions())
    with refuses(PushRolledBackError, says="UpdateWeights"):
        await updating.transfers.finish(started.update_id, None, 60.0)
    assert (updating.board.phase, updating.engine.running, updating.engine.live) == (Phase.RUNNING, True, live)
    assert updating.engine.weight_version == 1


async def test_an_update_that_nobody_sent_anything_for_ends_without_bytes(updating: Rig) -> None:
    """Its time to live ends it, and taints nothing."""
    await updating.transfers.start(UpdateOptions())
    await updating.transfers.update("", HALF, 60.0)
    await finish(updating)
    with advanced_clock() as clock:
        await updating.transfers.start(UpdateOptions(ttl_s=60.0))
        await clock.advance(61.0)
        await until(lambda: updating.board.phase is Phase.RUNNING and updating.engine.running)


async def test_an_id_of_an_update_is_short(updating: Rig) -> None:
    """Others are told it."""
    with refuses(InvalidFieldError, field="update_id"):
        await updating.transfers.start(UpdateOptions(update_id="x" * 257))


async def test_weights_that_are_dropped_while_an_update_waits_refuse_it(updating: Rig) -> None:
    """A sleep of level 2 that is under way has dropped nothing yet: what counts is what is there when the update has
    the engine."""
    gate = updating.engine.gates["sleep"] = Gate()
    sleeping = asyncio.create_task(updating.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(2, ()), 60.0))
    await gate.reached.wait()
    waking = asyncio.create_task(updating.sleeps.wake_up(["weights"]))
    await turns()  # its turn comes before the update's
    starting = asyncio.create_task(updating.transfers.start(UpdateOptions()))
    await turns()
    gate.open.set()
    await asyncio.gather(sleeping, waking)
    with pytest.raises(EngineTaintedError):
        await starting
    assert "transfer_start" not in updating.engine.calls
    assert (updating.board.phase, updating.engine.running) == (Phase.SLEEPING, False)
    await updating.push(header())
    await updating.sleeps.wake_up()
    assert (updating.engine.live, updating.engine.running) == (tensors(1), True)


async def test_weights_that_become_inconsistent_while_an_update_waits_refuse_it(updating: Rig) -> None:
    """As they would have before: what vLLM transfers is not verified, and heals nothing. A push does."""
    async with updating.pauses.undisturbed(60.0):
        starting = asyncio.create_task(updating.transfers.start(UpdateOptions()))
        await turns()
        updating.board.enter(EngineCondition.TAINTED)
    with pytest.raises(EngineTaintedError):
        await starting
    assert "transfer_start" not in updating.engine.calls
    assert updating.board.phase is Phase.TAINTED
    await updating.push(header())
    assert (updating.board.phase, updating.engine.live, updating.engine.running) == (Phase.RUNNING, tensors(1), True)


@pytest.mark.parametrize("step", ["transfer_abandon", "prepare_weights"])
async def test_why_an_update_could_not_be_undone_is_told_once(updating: Rig, step: str) -> None:
    """What failed first, and what failed then."""
    updating.engine.fails = {"transfer_update": GenserveError("first"), step: GenserveError("then")}
    await updating.transfers.start(UpdateOptions())
    with pytest.raises(EngineTaintedError) as tainted:
        await updating.transfers.update("", HALF, 60.0)
    assert [tainted.value.message.count(why) for why in ("first", "then")] == [1, 1]
