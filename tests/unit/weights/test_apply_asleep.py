"""Pushes that meet a sleep, or an engine that sleeps but for its weights; and weights that a sleep has dropped."""

import asyncio
from typing import Any

import pytest

from genserve.control.asleep import SleepDepth
from genserve.control.conditions import Phase
from genserve.engine.types import PauseMode
from genserve.errors import (
    DeadlineError,
    EngineSleepingError,
    EngineTaintedError,
    GenserveError,
    PushRolledBackError,
)
from genserve.tensors.manifest import Manifest
from genserve.weights.push.types import ApplyOptions, PushAction, PushOutcome, PushState
from genserve.weights.vllm_transfer import UpdateOptions
from tests.support.clocks import advanced_clock
from tests.support.patience import turns, until
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import MANIFEST, Rig, after, header, tensors, weights
from tests.unit.weights.prepared import is_preparing


async def sleep(rig: Rig, level: int = 2) -> None:
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(level, ()), 60.0)


async def drop_weights(rig: Rig) -> None:
    """They are awake afterwards, and of no version."""
    await sleep(rig)
    await rig.sleeps.wake_up(["weights"])
    assert rig.engine.live is rig.engine.dropped


async def test_a_wake_up_restores_the_served_version(rig: Rig) -> None:
    """Under its own number, before anything runs."""
    await rig.push(header(weight_version=3))
    await sleep(rig)
    await rig.sleeps.wake_up()
    assert (rig.engine.live, rig.engine.weight_version) == (tensors(3), 3)
    assert rig.engine.running
    assert rig.engine.calls[-4:] == [
        "prepare_weights",
        "commit_weights 3",
        "discard_weights paused",
        "wake_up scheduling+kv_cache",
    ]


async def test_a_wake_up_restores_the_checkpoint_before_the_first_push(rig: Rig) -> None:
    """Its files are the bytes of version 0."""
    await sleep(rig)
    await rig.sleeps.wake_up()
    assert (rig.engine.live, rig.engine.weight_version) == (tensors(0), 0)


@pytest.mark.parametrize("level", [1, 2])
async def test_a_push_between_the_weights_and_the_kv_cache(rig: Rig, level: int) -> None:
    """The step of a colocated trainer: the engine stands still until all of it is awake, and nothing is restored."""
    await sleep(rig, level)
    await rig.sleeps.wake_up(["weights"])
    outcome = await rig.push(header())
    assert outcome.applied is not None
    assert outcome.applied.paused_s is None
    assert not rig.engine.running
    assert (rig.board.phase, rig.board.state().weights_discarded) == (Phase.SLEEPING, False)
    await rig.sleeps.wake_up(["kv_cache"])
    assert rig.engine.running
    assert rig.engine.live == tensors(1)
    assert rig.engine.calls.count("prepare_weights") == 1


async def test_a_push_before_the_weights_are_awake_is_refused(rig: Rig) -> None:
    """Also a commit of what was staged."""
    await rig.push(header(action=PushAction.STAGE))
    await sleep(rig)
    with pytest.raises(EngineSleepingError):
        await rig.push(header("p2"))
    with pytest.raises(EngineSleepingError):
        await rig.registry.commit("p1", ApplyOptions())
    await rig.sleeps.wake_up(["weights"])
    await rig.registry.commit("p1", ApplyOptions())
    assert rig.engine.live == tensors(1)


async def test_a_partial_push_over_dropped_weights_brings_all_of_them(rig: Rig) -> None:
    """What it lacks comes from the resident bytes, so nothing that was dropped is left."""
    await drop_weights(rig)
    spec = next(each for each in MANIFEST.tensors if each.name == "a")
    part = Manifest((spec,), MANIFEST.total_bytes - 16, partial=True)
    await rig.push(header(manifest=part), weights(1)[:16])
    assert rig.engine.live == {"a": tensors(1)["a"], "b": tensors(0)["b"]}
    await rig.sleeps.wake_up()
    assert rig.engine.running


async def test_dropped_weights_without_resident_bytes_wait_for_a_push(rig: Rig) -> None:
    """The error says so, nothing runs, and the push heals."""
    rig.resident.forget("are not kept (--no-resident-weights)")
    await sleep(rig)
    with refuses(EngineTaintedError, says="--no-resident-weights"):
        await rig.sleeps.wake_up()
    assert not rig.engine.running
    assert rig.board.state().asleep_tags == ("scheduling", "kv_cache")
    await rig.push(header())
    await rig.sleeps.wake_up()
    assert rig.engine.running
    assert rig.engine.live == tensors(1)


async def test_a_push_that_fails_over_dropped_weights_leaves_them_dropped(rig: Rig) -> None:
    """What it was exchanged back for is of no version."""
    await drop_weights(rig)
    rig.engine.fails["commit_weights"] = PushRolledBackError("a rank failed")
    with pytest.raises(PushRolledBackError):
        await rig.push(header())
    assert rig.board.state().weights_discarded
    await rig.sleeps.wake_up(["kv_cache"])
    assert rig.engine.live == tensors(0)
    assert rig.engine.running


async def test_push_that_taints_a_sleeping_engine_is_healed_asleep(rig: Rig) -> None:
    """By the resident version, as it is while the engine is awake."""
    await drop_weights(rig)
    rig.engine.fails["commit_weights"] = EngineTaintedError("half of it")
    with pytest.raises(PushRolledBackError):
        await rig.push(header())
    assert (rig.board.phase, rig.board.state().weights_discarded) == (Phase.SLEEPING, False)
    assert rig.engine.live == tensors(0)
    assert not rig.engine.running


async def test_a_wake_up_waits_for_the_push_that_may_bring_the_weights(rig: Rig) -> None:
    """A worker prepares one version at a time; nothing has to be restored afterwards."""
    await drop_weights(rig)
    gate = rig.engine.gates["prepare_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(header()))
    await gate.reached.wait()
    waking = asyncio.create_task(rig.sleeps.wake_up())
    await turns()
    assert not rig.engine.running and not waking.done()
    del rig.engine.gates["prepare_weights"]
    gate.open.set()
    await pushing
    await waking
    assert rig.engine.running
    assert rig.engine.live == tensors(1)
    assert rig.engine.calls.count("prepare_weights") == 1


async def test_a_sleep_that_fails_while_a_push_arrives_is_undone(rig: Rig) -> None:
    """Bytes that arrive are in nobody's way: the weights are restored and requests run."""
    stream = await rig.registry.open(header())
    rig.engine.fails["sleep"] = GenserveError("an earlier push is still being freed here")
    with refuses(GenserveError):
        await sleep(rig)
    await until(lambda: (rig.board.phase, rig.engine.running) == (Phase.RUNNING, True))
    assert rig.engine.live == tensors(0)
    stream.detach()


async def test_a_push_waits_until_a_failed_sleep_is_undone(rig: Rig) -> None:
    """Also when that takes longer than the Sleep's caller waits: a worker prepares one version at a time, and not while
    its weights sleep."""
    rig.engine.fails["sleep"] = GenserveError("no memory on the host")
    waking = rig.engine.gates["wake_up"] = Gate()
    with advanced_clock() as clock, refuses(GenserveError):
        await after(clock, 2.0, sleep(rig), waking.reached.is_set)
    pushing = asyncio.create_task(rig.push(header()))
    await until(lambda: is_preparing(rig))
    await turns()
    assert "prepare_weights" not in rig.engine.calls
    del rig.engine.gates["wake_up"]
    waking.open.set()
    assert (await pushing).applied is not None
    assert rig.engine.live == tensors(1)
    assert (rig.board.phase, rig.engine.running) == (Phase.RUNNING, True)


async def prepares(rig: Rig) -> tuple[Gate, "asyncio.Task[PushOutcome]"]:
    """A push that the workers prepare, until the gate opens."""
    gate = rig.engine.gates["prepare_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(header()))
    await gate.reached.wait()
    del rig.engine.gates["prepare_weights"]
    return gate, pushing


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleep_waits_for_the_push_that_is_being_prepared(rig: Rig, level: int) -> None:
    """Nothing of it is lost: it is applied, and its version is served after the wake-up."""
    gate, pushing = await prepares(rig)
    sleeping = asyncio.create_task(sleep(rig, level))
    await turns()
    assert (rig.board.phase, rig.engine.running) == (Phase.RUNNING, True)
    gate.open.set()
    assert (await pushing).applied is not None
    await sleeping
    assert rig.engine.asleep
    await rig.sleeps.wake_up()
    assert (rig.engine.live, rig.engine.weight_version) == (tensors(1), 1)


async def test_a_sleep_whose_time_is_over_names_the_push_that_it_waited_for(rig: Rig) -> None:
    """And touches nothing: requests run, and the push is applied."""
    gate, pushing = await prepares(rig)
    with advanced_clock() as clock, refuses(DeadlineError, says="'p1'"):
        await after(clock, 61.0, sleep(rig))
    assert rig.engine.calls == ["prepare_weights"]
    gate.open.set()
    assert (await pushing).applied is not None
    await sleep(rig)


@pytest.mark.parametrize("options", [{"level": 0}, {"tags": ["kv_cache"]}])
async def test_a_sleep_that_keeps_the_weights_waits_for_no_push(rig: Rig, options: Any) -> None:
    """Which is applied while the engine sleeps."""
    gate, pushing = await prepares(rig)
    depth = SleepDepth.of(options.get("level"), options.get("tags", ()))
    await rig.sleeps.sleep(PauseMode.KEEP, depth, 60.0)
    gate.open.set()
    assert (await pushing).applied is not None
    await rig.sleeps.wake_up()
    assert rig.engine.live == tensors(1)


async def test_a_push_that_meets_a_sleep_under_way_keeps_its_bytes(rig: Rig) -> None:
    """It is refused before a worker is asked for memory, and can be committed after the wake-up without being sent
    again."""
    gate = rig.engine.gates["sleep"] = Gate()
    sleeping = asyncio.create_task(sleep(rig, 1))
    await gate.reached.wait()
    pushing = asyncio.create_task(rig.push(header()))
    await until(lambda: is_preparing(rig))
    gate.open.set()
    await sleeping
    with pytest.raises(EngineSleepingError):
        await pushing
    assert "prepare_weights" not in rig.engine.calls
    await rig.sleeps.wake_up()
    assert (await rig.registry.commit("p1", ApplyOptions())).applied is not None
    assert rig.engine.live == tensors(1)


async def test_vllm_s_transfer_takes_awake_weights_and_no_dropped_ones(rig: Rig) -> None:
    """It may bring some of the tensors only, and what it brings is not verified."""
    rig.engine.backend = "nccl"
    await sleep(rig, 1)
    await rig.sleeps.wake_up(["weights"])
    await rig.transfers.start(UpdateOptions(update_id="u1"))
    assert rig.board.phase is Phase.SLEEPING
    await rig.transfers.update("u1", '{"a": "new"}', 60.0)
    await rig.transfers.finish("u1", None, 60.0)
    assert not rig.engine.running
    assert rig.board.phase is Phase.SLEEPING
    await rig.sleeps.wake_up()
    assert rig.engine.running
    await drop_weights(rig)
    with refuses(EngineTaintedError, says="push a complete version"):
        await rig.transfers.start(UpdateOptions(update_id="u2"))
    await rig.push(header(weight_version=5))
    await rig.transfers.start(UpdateOptions(update_id="u3"))


async def test_vllm_s_transfer_follows_the_wake_up_that_restores(rig: Rig) -> None:
    """The error says so while the bytes of the served version are here."""
    rig.engine.backend = "nccl"
    await drop_weights(rig)
    with refuses(EngineTaintedError, says="wake up the rest"):
        await rig.transfers.start(UpdateOptions(update_id="u1"))
    await rig.sleeps.wake_up()
    await rig.transfers.start(UpdateOptions(update_id="u1"))


async def test_a_push_that_waits_for_a_sleep_for_too_long_has_changed_nothing(rig: Rig) -> None:
    """It is told so, and keeps its bytes."""
    gate = rig.engine.gates["sleep"] = Gate()
    sleeping = asyncio.create_task(sleep(rig, 1))
    await gate.reached.wait()
    with advanced_clock() as clock:
        with pytest.raises(DeadlineError):
            await after(clock, 61.0, rig.push(header(apply=ApplyOptions(timeout_s=60.0))), lambda: is_preparing(rig))
        await until(lambda: not is_preparing(rig))  # a slow loop answers before the push has failed
    report = rig.registry.report("p1").push
    assert report.state is PushState.FAILED and report.issues
    assert "prepare_weights" not in rig.engine.calls
    gate.open.set()
    await sleeping
