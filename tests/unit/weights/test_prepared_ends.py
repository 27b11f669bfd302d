"""What ends the waiting of a push that is prepared, and what does not: workers hold nothing for nobody."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from genserve.control.asleep import SleepDepth
from genserve.control.membership import FleetCommit, FleetRecord
from genserve.engine.types import PauseMode
from genserve.errors import FleetHeldError, PushConflictError, PushNotFoundError
from genserve.tensors.manifest import Manifest
from genserve.weights.push.pulled_push import PulledPush
from genserve.weights.push.types import ApplyOptions, PushAction, PushState
from genserve.weights.resident import ResidentVersion
from genserve.weights.vllm_transfer import UpdateOptions
from tests.support.clocks import advanced_clock
from tests.support.patience import until
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import (
    MANIFEST,
    Rig,
    assert_unchanged,
    header,
    num_arenas,
    send,
    tensors,
    weights,
)
from tests.unit.weights.prepared import PART, commit, is_preparing, preparing, state, until_freed
from tests.unit.weights.transfers import HALF, finish

pytestmark = pytest.mark.usefixtures("takes_arriving_weights")


async def test_another_push_that_is_applied_ends_it(rig: Rig) -> None:
    """It is staged again, and its commit prepares it anew."""
    await rig.push(preparing("waits", 5))
    await rig.push(header("other", 2))
    assert state(rig, "waits") is PushState.STAGED
    await until_freed(rig, 2)
    calls = len(rig.engine.calls)
    assert (await commit(rig, "waits")).push.state is PushState.APPLIED
    assert rig.engine.calls[calls] == "prepare_weights"
    assert rig.engine.live == tensors(5)


async def test_commit_of_a_router_that_has_gone_exchanges_nothing(rig: Rig) -> None:
    """Another one has found what is served, and counts on it."""
    await rig.push(preparing())
    commit_for_nobody = FleetCommit(rig.board.membership, "gone", FleetRecord(7, b""))
    with pytest.raises(FleetHeldError):
        await rig.registry.commit("p1", ApplyOptions(), fleet=commit_for_nobody)
    assert not [call for call in rig.engine.calls if "commit" in call] and rig.engine.weight_version == 0
    await until_freed(rig)
    await commit(rig)
    assert rig.engine.live == tensors(1)


async def test_another_push_that_is_received_or_staged_does_not(rig: Rig) -> None:
    """Only what is applied does."""
    await rig.push(preparing("waits", 5))
    await rig.push(header("staged", 6, action=PushAction.STAGE))
    stream = await rig.registry.open(header("breaks off", 2))
    send(stream, weights(2), 0, 14)
    stream.detach()
    assert state(rig, "waits") is PushState.PREPARED
    assert rig.engine.calls == ["prepare_weights"]
    await commit(rig, "waits")
    assert rig.engine.calls.count("prepare_weights") == 1


async def test_a_sleep_of_the_weights_ends_it(rig: Rig) -> None:
    """Their memory is what the sleep is for."""
    await rig.push(preparing())
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(1, ()), 60.0)
    assert rig.engine.prepared == {}
    assert state(rig) is PushState.STAGED
    await rig.sleeps.wake_up()
    await commit(rig)
    assert rig.engine.live == tensors(1)
    assert rig.engine.calls.count("prepare_weights") == 2


async def test_an_update_through_vllms_transfer_ends_it(rig: Rig) -> None:
    """It would exchange what the live model had before."""
    rig.engine.backend = "scripted"
    await rig.push(preparing("p1", 5))
    await rig.transfers.start(UpdateOptions())
    assert state(rig) is PushState.STAGED
    await rig.transfers.update("", HALF, 60.0)
    assert await finish(rig) == 1
    await commit(rig)
    assert rig.engine.live == tensors(5)
    assert rig.engine.calls.count("prepare_weights") == 2


@pytest.mark.parametrize("end", ["discarded", "expired", "in conflict", "shut down"])
async def test_whatever_ends_the_push_frees_the_workers_memory(rig: Rig, end: str) -> None:
    """And its bytes."""
    before = num_arenas()
    await rig.push(preparing(prepared_ttl_s=60.0, staging_ttl_s=600.0))
    assert len(rig.engine.prepared) == 1
    match end:
        case "expired":
            with advanced_clock() as clock:
                await clock.advance(61.0)
        case "discarded":
            assert rig.registry.discard("p1").push.state is PushState.PREPARED
        case "in conflict":
            stream = await rig.registry.open(preparing())
            with pytest.raises(PushConflictError):
                stream.write(0, b"other", None)
            stream.detach()
        case "shut down":
            await rig.registry.close()
            assert rig.engine.prepared == {}, "the shutdown goes on before the memory is freed"
    await until_freed(rig)
    if end == "in conflict":
        assert state(rig) is PushState.FAILED
    else:
        with pytest.raises(PushNotFoundError):
            rig.registry.report("p1")
    assert num_arenas() == before
    await assert_unchanged(rig)


async def test_its_time_begins_when_it_is_prepared_and_again_when_it_is_staged(rig: Rig) -> None:
    """Each state has its own."""
    gate = rig.engine.gates["prepare_weights"] = Gate()
    with advanced_clock() as clock:
        pushing = asyncio.create_task(rig.push(preparing(prepared_ttl_s=1000.0, staging_ttl_s=400.0)))
        await until(lambda: is_preparing(rig))
        await clock.advance(200.0)
        gate.open.set()
        await pushing
        await clock.advance(900.0)
        assert state(rig) is PushState.PREPARED
        await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(1, ()), 60.0)
        await rig.sleeps.wake_up()
        await clock.advance(300.0)
        assert state(rig) is PushState.STAGED
        await clock.advance(101.0)
        await until(lambda: "p1" not in rig.registry.live)
    with pytest.raises(PushNotFoundError):
        await commit(rig)


async def test_a_part_is_prepared_and_completed_anew_from_what_is_served_then(rig: Rig) -> None:
    """It is what it brings and the rest of the served version, whichever that is at its commit."""
    assert (await rig.push(preparing("part", 7, manifest=PART), weights(7)[:16])).push.state is PushState.PREPARED
    (prepared,) = rig.engine.prepared.values()
    assert prepared == {"a": weights(7)[:16], "b": weights(0)[16:]}
    await rig.push(header("other", 2))
    assert state(rig, "part") is PushState.STAGED
    await commit(rig, "part")
    assert rig.engine.live == {"a": weights(7)[:16], "b": weights(2)[16:]}


async def test_a_part_is_completed_from_a_version_of_another_layout(rig: Rig) -> None:
    """Its tensors lie in another order and elsewhere."""
    await rig.push(preparing("part", 7, manifest=PART), weights(7)[:16])
    a, b = MANIFEST.tensors
    turned = Manifest((replace(b, offset=0), replace(a, offset=16)), 32)
    await rig.push(header("other", 2, manifest=turned))
    await commit(rig, "part")
    assert rig.engine.live == {"a": weights(7)[:16], "b": weights(2)[:16]}


async def test_a_push_that_is_staged_again_is_gone_after_the_time_for_that(rig: Rig) -> None:
    """Whoever waits for its end as a prepared one learns that it comes sooner."""
    await rig.push(preparing(prepared_ttl_s=6000.0, staging_ttl_s=60.0))
    with advanced_clock() as clock:
        await clock.advance(300.0)
        assert state(rig) is PushState.PREPARED
        await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(1, ()), 60.0)
        await clock.advance(61.0)
        await until(lambda: "p1" not in rig.registry.live)
    await rig.sleeps.wake_up()


async def test_reader_of_a_part_never_reads_overwritten_bytes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers pull what workers have prepared; completed from another version it is another one."""
    await rig.push(preparing("part", 7, manifest=PART), weights(7)[:16])
    push = rig.registry.live.find("part")
    early = PulledPush(push, rig.resident)
    assert bytes(early.view(0, 32)) == weights(7)[:16] + weights(0)[16:]
    await rig.push(header("other", 2))
    copy = ResidentVersion.copy_into

    def copy_into(base: ResidentVersion, *args: Any) -> None:
        with pytest.raises(PushNotFoundError):
            early.view(0, 32)
        copy(base, *args)

    monkeypatch.setattr(ResidentVersion, "copy_into", copy_into)
    gate = rig.engine.gates["prepare_weights"] = Gate()
    committing = asyncio.create_task(commit(rig, "part"))
    await gate.reached.wait()
    with pytest.raises(PushNotFoundError):
        early.view(0, 32)
    assert bytes(PulledPush(push, rig.resident).view(0, 32)) == weights(7)[:16] + weights(2)[16:]
    gate.open.set()
    await committing
