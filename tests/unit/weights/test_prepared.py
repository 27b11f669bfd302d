"""A push that is prepared and waits for its commit: what ends that, and what does not."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from genserve.control.asleep import SleepDepth
from genserve.engine.types import PauseMode
from genserve.errors import (
    DeadlineError,
    GenserveError,
    PushConflictError,
    PushNotFoundError,
    PushRolledBackError,
    PushTruncatedError,
    StagingFullError,
    VersionNotNewerError,
    WeightVersionMismatchError,
)
from genserve.tensors.manifest import Manifest
from genserve.weights.push.staging import Staging
from genserve.weights.push.types import ApplyOptions, PushAction, PushHeader, PushOutcome, PushState
from genserve.weights.vllm_transfer import UpdateOptions
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import (
    MANIFEST,
    Rig,
    assert_unchanged,
    build_rig,
    further,
    header,
    num_arenas,
    send,
    tensors,
    weights,
)
from tests.unit.weights.transfers import HALF, finish

PART = Manifest(MANIFEST.tensors[:1], 16, partial=True)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """One with room for several pushes, whose workers see bytes arrive."""
    rig = build_rig(tmp_path, 200)
    rig.engine.takes_arriving_weights = True
    yield rig
    for task in rig.background:
        assert not task.done()
        task.cancel()
    await asyncio.wait(rig.background)
    await rig.registry.close()
    assert rig.engine.prepared == {}, "workers hold what nobody will use"
    rig.resident.release_memory()
    assert rig.engine.misuses == []


def preparing(push_id: str = "p1", version: int = 1, **fields: object) -> PushHeader:
    return header(push_id, version, action=PushAction.PREPARE, attempt="one", **fields)


def state(rig: Rig, push_id: str = "p1") -> PushState:
    return rig.registry.report(push_id).push.state


async def commit(rig: Rig, push_id: str = "p1") -> PushOutcome:
    return await rig.registry.commit(push_id, ApplyOptions())


async def until_freed(rig: Rig, num_discards: int = 1) -> None:
    """Returns when workers hold nothing but the live version."""
    async with asyncio.timeout(5):
        while sum("discard" in call for call in rig.engine.calls) < num_discards:
            await asyncio.sleep(0.001)
    async with rig.applier.between_pushes(5):
        assert rig.engine.prepared == {}


async def test_it_waits_beside_the_live_version_and_its_commit_only_exchanges(rig: Rig) -> None:
    """Nothing is prepared or checked again, and generation never stops before."""
    outcome = await rig.push(preparing())
    assert (outcome.push.state, outcome.applied) == (PushState.PREPARED, None)
    assert rig.engine.calls == ["prepare_weights"]
    assert (rig.engine.live, rig.engine.weight_version) == (tensors(0), 0)
    await asyncio.wait_for(anext_turn(rig), 5)  # nobody holds the applier's lock
    assert state(rig) is PushState.PREPARED
    outcome = await commit(rig)
    assert outcome.applied is not None and outcome.applied.active_version == 1
    assert rig.engine.calls[:4] == ["prepare_weights", "pause keep recompute", "commit_weights 1", "resume"]
    assert rig.engine.live == tensors(1)
    assert (await commit(rig)).applied == outcome.applied


async def anext_turn(rig: Rig) -> None:
    """Takes the applier's lock as an adapter's or a beginning push does, without ending what is prepared."""
    async with rig.applier._lock:
        pass


async def test_without_early_bytes_it_is_prepared_when_they_are_there(rig: Rig) -> None:
    """Workers on other hosts."""
    rig.engine.takes_arriving_weights = False
    gate = rig.engine.gates["prepare_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(preparing()))
    await gate.reached.wait()
    assert state(rig) is PushState.PREPARING
    committing = asyncio.create_task(commit(rig))  # waits for it, and is no answer of it
    await asyncio.sleep(0.01)
    assert not committing.done()
    gate.open.set()
    assert (await pushing).push.state is PushState.PREPARED
    assert (await committing).push.state is PushState.APPLIED
    assert rig.engine.calls.count("prepare_weights") == 1


async def test_the_bytes_are_not_checked_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was staged or prepared: they do not change."""
    for version, action in ((1, PushAction.STAGE), (2, PushAction.PREPARE)):
        await rig.push(header(f"p{version}", version, action=action))
        with monkeypatch.context() as patch:
            patch.setattr(Staging, "tied_issues", None)
            await commit(rig, f"p{version}")
    assert rig.engine.live == tensors(2)


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
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(1, ()), 5.0)
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
    await rig.transfers.update("", HALF, 5.0)
    assert await finish(rig) == 1
    await commit(rig)
    assert rig.engine.live == tensors(5)
    assert rig.engine.calls.count("prepare_weights") == 2


async def test_a_second_one_is_refused_and_told_which_has_the_place(rig: Rig) -> None:
    """At its header, before it sends a byte."""
    await rig.push(preparing("first", 1))
    with pytest.raises(StagingFullError, match="'first' is prepared") as full:
        await rig.registry.open(preparing("second", 2))
    assert full.value.metadata == {"push_id": "first"}
    await commit(rig, "first")
    assert (await rig.push(preparing("second", 2))).push.state is PushState.PREPARED
    await commit(rig, "second")


async def test_a_second_one_that_was_staged_stays_so(rig: Rig) -> None:
    """Both were joined before either was prepared; the later one is told when it has sent all."""
    await rig.push(header("p1", 1, action=PushAction.STAGE, attempt="zero"))
    await rig.push(header("p2", 2, action=PushAction.STAGE, attempt="zero"))
    streams = [await rig.registry.open(preparing(f"p{version}", version)) for version in (1, 2)]
    for version, stream in enumerate(streams, 1):
        send(stream, weights(version))
    assert (await streams[0].finish()).push.state is PushState.PREPARED
    with pytest.raises(StagingFullError, match="'p1' is prepared"):
        await streams[1].finish()
    for stream in streams:
        stream.detach()
    assert (state(rig), state(rig, "p2")) == (PushState.PREPARED, PushState.STAGED)
    await commit(rig)
    await commit(rig, "p2")
    assert rig.engine.live == tensors(2)


@pytest.mark.parametrize("end", ["discarded", "expired", "in conflict", "shut down"])
async def test_whatever_ends_the_push_frees_the_workers_memory(rig: Rig, end: str) -> None:
    """And its bytes."""
    before = num_arenas()
    await rig.push(preparing(prepared_ttl_s=0.05 if end == "expired" else 60.0, staging_ttl_s=60.0))
    assert len(rig.engine.prepared) == 1 or end == "expired"
    match end:
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
    assert_unchanged(rig)


async def test_its_time_begins_when_it_is_prepared_and_again_when_it_is_staged(tmp_path: Path) -> None:
    """Each state has its own."""
    now_s = 0.0
    rig = build_rig(tmp_path, 200, lambda: now_s)
    rig.engine.takes_arriving_weights = True
    await rig.push(preparing(prepared_ttl_s=60.0, staging_ttl_s=10.0))
    now_s = 59.0
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(1, ()), 5.0)
    await rig.sleeps.wake_up()
    now_s = 68.0
    rig.registry._pushes.tell_change()
    await asyncio.sleep(0.01)
    assert state(rig) is PushState.STAGED
    now_s = 69.5
    rig.registry._pushes.tell_change()
    await asyncio.sleep(0.01)
    with pytest.raises(PushNotFoundError):
        await commit(rig)
    for task in rig.background:
        task.cancel()
    await rig.registry.close()
    rig.resident.release_memory()


async def test_who_asks_again_is_told_again_without_work(rig: Rig) -> None:
    """With or without the bytes, on several streams; the same id and attempt."""
    opened = preparing(num_streams=2)
    streams = [await rig.registry.open(opened), await rig.registry.open(further(opened))]
    send(streams[0], weights(1), 0, 14)
    send(streams[1], weights(1), 14)
    told = [outcome.push for outcome in await asyncio.gather(*(stream.finish() for stream in streams))]
    for stream in streams:
        stream.detach()
    told += [(await rig.push(opened, data)).push for data in (weights(1), b"")]
    assert [push.state for push in told] == [PushState.PREPARED] * 4
    assert rig.engine.calls == ["prepare_weights"]
    await commit(rig)
    assert (await rig.push(opened)).push.state is PushState.APPLIED


async def test_another_attempt_has_to_prove_its_bytes(rig: Rig) -> None:
    """Then it is prepared as it is; an attempt that breaks off leaves it staged."""
    await rig.push(preparing())
    again = replace(preparing(), attempt="two")
    assert (await rig.push(again)).push.state is PushState.PREPARED
    assert rig.engine.calls == ["prepare_weights"]
    with pytest.raises(PushTruncatedError):
        await rig.push(replace(again, attempt="three"), weights(1)[:14])
    await until_freed(rig)
    assert state(rig) is PushState.STAGED
    await commit(rig)
    assert rig.engine.live == tensors(1)


async def test_it_may_be_sent_again_to_be_applied_or_staged(rig: Rig) -> None:
    """What is prepared is used, or freed."""
    await rig.push(preparing())
    assert (await rig.push(header(attempt="one", action=PushAction.STAGE), b"")).push.state is PushState.STAGED
    await until_freed(rig)
    assert (await rig.push(preparing(), b"")).push.state is PushState.PREPARED
    assert (await rig.push(header(attempt="one"), b"")).push.state is PushState.APPLIED
    assert rig.engine.calls.count("prepare_weights") == 2
    assert rig.engine.live == tensors(1)


async def test_a_commit_that_is_refused_leaves_it_prepared(rig: Rig) -> None:
    """Nothing was tried."""
    await rig.push(preparing(expected_version=0))
    with pytest.raises(WeightVersionMismatchError):
        await rig.registry.commit("p1", ApplyOptions(), 7)
    assert state(rig) is PushState.PREPARED
    await commit(rig)
    assert rig.engine.calls.count("prepare_weights") == 1


async def test_versions_are_checked_at_the_header_and_at_the_commit(rig: Rig) -> None:
    """Another version may have come in between."""
    await rig.push(preparing("older", 2))
    await rig.push(header("newer", 3))
    with pytest.raises(VersionNotNewerError):
        await commit(rig, "older")
    assert state(rig, "older") is PushState.STAGED
    with pytest.raises(VersionNotNewerError):
        await rig.registry.open(preparing("p", 3))


@pytest.mark.parametrize("arriving", [True, False])
@pytest.mark.parametrize("fault", ["raises", "hangs"])
async def test_a_preparation_that_fails_changes_nothing(rig: Rig, fault: str, arriving: bool) -> None:
    """FAILED, nothing is left in the workers, and it can be committed when the fault is gone."""
    rig.engine.takes_arriving_weights = arriving
    if fault == "hangs":
        rig.engine.hangs.add("prepare_weights")
    else:
        rig.engine.fails["prepare_weights"] = ValueError("no")
    with pytest.raises(DeadlineError if fault == "hangs" else PushRolledBackError):
        await rig.push(preparing(apply=ApplyOptions(timeout_s=0.05)))
    assert state(rig) is PushState.FAILED
    assert_unchanged(rig)
    rig.engine.hangs.clear()
    await commit(rig)
    assert rig.engine.live == tensors(1)


async def test_an_exchange_that_fails_prepares_again_at_the_next_commit(rig: Rig) -> None:
    """What workers had is discarded with it."""
    await rig.push(preparing())
    rig.engine.fails["commit_weights"] = PushRolledBackError("no")
    with pytest.raises(PushRolledBackError):
        await commit(rig)
    assert state(rig) is PushState.FAILED
    assert_unchanged(rig)
    await commit(rig)
    assert rig.engine.calls.count("prepare_weights") == 2
    assert rig.engine.live == tensors(1)


async def test_a_client_that_is_gone_changes_nothing(rig: Rig) -> None:
    """It is prepared all the same, and its state says so."""
    gate = rig.engine.gates["prepare_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(preparing()))
    await gate.reached.wait()
    while state(rig) is not PushState.PREPARING:
        await asyncio.sleep(0.001)
    pushing.cancel()
    await asyncio.wait({pushing})
    gate.open.set()
    async with asyncio.timeout(5):
        while state(rig) is not PushState.PREPARED:
            await asyncio.sleep(0.001)
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


async def test_a_part_that_is_still_prepared_is_not_completed_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commit is the exchange alone."""
    await rig.push(preparing("part", 7, manifest=PART), weights(7)[:16])
    monkeypatch.setattr(Staging, "complete", None)
    await commit(rig, "part")
    assert rig.engine.live == {"a": weights(7)[:16], "b": weights(0)[16:]}
    assert rig.engine.calls.count("prepare_weights") == 1


async def test_a_lease_that_is_lost_is_told(rig: Rig) -> None:
    """It fails as any commit does."""
    await rig.push(preparing())
    with pytest.raises(GenserveError):
        await rig.registry.commit("p1", ApplyOptions(pause_lease_id="gone"))
    await commit(rig)
    assert rig.engine.live == tensors(1)
