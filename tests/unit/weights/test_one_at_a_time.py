"""Pushes, updates and sleeps take turns: what the others are told meanwhile, and that their turn comes."""

import asyncio

import pytest

from genserve.control.asleep import SleepDepth
from genserve.engine.types import PauseMode
from genserve.errors import ApplyInProgressError, DeadlineError, PushRolledBackError
from genserve.weights.push.types import ApplyOptions, PushAction, PushState
from genserve.weights.vllm_transfer import UpdateOptions
from tests.support.clocks import advanced_clock
from tests.support.patience import turns
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import Rig, after, header, tensors


@pytest.mark.parametrize("step", ["prepare_weights", "commit_weights"])
async def test_commit_during_another_push_names_it_and_succeeds_afterwards(rig: Rig, step: str) -> None:
    """At once: it does not wait for the engine, and its bytes stay staged. Whether the other one is applied or not."""
    for version in (1, 2, 3):
        await rig.push(header(f"p{version}", version, action=PushAction.STAGE))
    for first, second, failure in (("p1", "p2", PushRolledBackError("no")), ("p1", "p2", None), ("p2", "p3", None)):
        gate = rig.engine.gates[step] = Gate()
        if failure is not None:
            rig.engine.fails[step] = failure
        applying = asyncio.create_task(rig.registry.commit(first, ApplyOptions()))
        await gate.reached.wait()
        meeting = asyncio.create_task(rig.registry.commit(second, ApplyOptions()))
        await turns()
        gate.open.set()
        await asyncio.wait({applying})
        with pytest.raises(ApplyInProgressError) as met:
            await meeting
        assert met.value.metadata == {"push_id": first}
        assert rig.registry.report(second).push.state is PushState.STAGED
        assert applying.exception() is failure
    assert rig.engine.live == tensors(2)
    await rig.registry.commit("p3", ApplyOptions())
    assert rig.engine.live == tensors(3)


async def test_a_commit_that_others_have_kept_from_the_engine_can_be_repeated(rig: Rig) -> None:
    """Such as a load of an adapter that hangs: what is prepared stays so."""
    await rig.push(header(action=PushAction.PREPARE))
    async with rig.pauses.undisturbed(600.0, "the load of an adapter"):
        with advanced_clock() as clock, refuses(DeadlineError, says="the load of an adapter"):
            await after(clock, 60.1, rig.registry.commit("p1", ApplyOptions(timeout_s=60.0)))
    assert rig.registry.report("p1").push.state is PushState.PREPARED
    await rig.registry.commit("p1", ApplyOptions())
    assert rig.engine.live == tensors(1)
    assert rig.engine.calls.count("prepare_weights") == 1


async def test_sleep_waiting_for_another_one_names_no_push_that_has_ended(rig: Rig) -> None:
    """Whatever became of that: nobody has to ask GetPush."""
    await rig.push(header())
    rig.engine.fails["prepare_weights"] = PushRolledBackError("no")
    with pytest.raises(PushRolledBackError):
        await rig.push(header("p2", 2))
    gate = rig.engine.gates["sleep"] = Gate()
    sleeping = asyncio.create_task(rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(1, ()), 600.0))
    await gate.reached.wait()
    with advanced_clock() as clock, refuses(DeadlineError, says="another sleep"):
        await after(clock, 61.0, rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(1, ()), 60.0))
    gate.open.set()
    await sleeping


async def test_sleep_waiting_for_a_push_to_free_old_weights_names_it(rig: Rig) -> None:
    """GetPush says already that the push is applied. The sleep's turn comes as soon as that is freed."""
    gate = rig.engine.gates["discard_weights"] = Gate()
    await rig.push(header())
    with advanced_clock() as clock, refuses(DeadlineError, says="'p1' replaced"):
        await after(clock, 61.0, rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(1, ()), 60.0))
    sleeping = asyncio.create_task(rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(1, ()), 600.0))
    gate.open.set()
    await sleeping


@pytest.mark.parametrize("call", ["init", "start"])
async def test_an_update_is_refused_while_the_call_of_another_one_is_carried_out(rig: Rig, call: str) -> None:
    """At once, and it is told which: a worker that receives may need minutes."""
    rig.engine.backend = "scripted"
    await rig.transfers.start(UpdateOptions(update_id="u1"))
    gate = rig.engine.gates["transfer_update"] = Gate()
    receiving = asyncio.create_task(rig.transfers.update("u1", "{}", 30.0))
    await gate.reached.wait()
    other = rig.transfers.init("{}", 30.0) if call == "init" else rig.transfers.start(UpdateOptions(update_id="u2"))
    meeting = asyncio.ensure_future(other)
    await turns()
    is_told_at_once = meeting.done()
    gate.open.set()
    await receiving
    with pytest.raises(ApplyInProgressError) as met:
        await meeting
    assert met.value.metadata == {"update_id": "u1"}
    assert is_told_at_once
    await rig.transfers.finish("u1", None, 30.0)


async def test_announced_version_has_its_bytes(rig: Rig) -> None:
    """From the commit on, also before the engine runs again."""
    gate = rig.engine.gates["resume"] = Gate()
    pushing = asyncio.create_task(rig.push(header()))
    await gate.reached.wait()
    assert rig.engine.weight_version == rig.resident.require().weight_version == 1
    gate.open.set()
    await pushing
    assert rig.resident.require().weight_version == 1
