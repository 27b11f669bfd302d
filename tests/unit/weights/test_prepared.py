"""A push that is prepared and waits for its commit: what it costs, who asks again, and what fails."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from genserve.errors import (
    ApplyInProgressError,
    DeadlineError,
    GenserveError,
    PushNotFoundError,
    PushRolledBackError,
    PushTruncatedError,
    StagingFullError,
    VersionNotNewerError,
    WeightVersionMismatchError,
)
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.staging import Staging
from genserve.weights.push.types import ApplyOptions, PushAction, PushState
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, turns, until
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import (
    Rig,
    after,
    assert_unchanged,
    further,
    header,
    nothing_runs,
    send,
    tensors,
    weights,
)
from tests.unit.weights.prepared import PART, commit, is_preparing, preparing, state, until_freed

pytestmark = pytest.mark.usefixtures("takes_arriving_weights")


async def test_it_waits_beside_the_live_version_and_its_commit_only_exchanges(rig: Rig) -> None:
    """Nothing is prepared or checked again, and generation never stops before."""
    outcome = await rig.push(preparing())
    assert (outcome.push.state, outcome.applied) == (PushState.PREPARED, None)
    assert rig.engine.calls == ["prepare_weights"]
    assert (rig.engine.live, rig.engine.weight_version) == (tensors(0), 0)
    assert state(rig) is PushState.PREPARED
    outcome = await commit(rig)
    assert outcome.applied is not None and outcome.applied.active_version == 1
    assert rig.engine.calls[:4] == ["prepare_weights", "pause keep recompute", "commit_weights 1", "resume"]
    assert rig.engine.live == tensors(1)
    assert (await commit(rig)).applied == outcome.applied


async def test_without_early_bytes_it_is_prepared_when_they_are_there(rig: Rig) -> None:
    """Workers on other hosts."""
    rig.engine.weights.takes_arriving = False
    gate = rig.engine.gates["prepare_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(preparing()))
    await gate.reached.wait()
    assert state(rig) is PushState.PREPARING
    committing = asyncio.create_task(commit(rig))  # waits for it, and is no answer of it
    await turns()
    assert not committing.done()
    gate.open.set()
    assert (await pushing).push.state is PushState.PREPARED
    assert (await committing).push.state is PushState.APPLIED
    assert rig.engine.calls.count("prepare_weights") == 1


async def test_commit_reports_how_long_the_push_waited_for_its_preparation(rig: Rig) -> None:
    """The answer of a push that is only prepared has no steps, so those of its commit include it."""
    gate = rig.engine.gates["prepare_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(preparing()))
    await gate.reached.wait()
    await until(lambda: is_preparing(rig))
    began_s = time.perf_counter()
    await nothing_runs()
    held_s = time.perf_counter() - began_s
    gate.open.set()
    await pushing
    applied = (await commit(rig)).applied
    assert applied is not None and applied.step_s["prepare"] >= held_s


async def test_the_bytes_are_not_checked_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what was staged or prepared: they do not change."""
    for version, action in ((1, PushAction.STAGE), (2, PushAction.PREPARE)):
        await rig.push(header(f"p{version}", version, action=action))
        with monkeypatch.context() as patch:
            patch.setattr(Staging, "tied_issues", None)
            await commit(rig, f"p{version}")
    assert rig.engine.live == tensors(2)


async def test_a_second_one_is_refused_and_told_which_has_the_place(rig: Rig) -> None:
    """At its header, before it sends a byte."""
    await rig.push(preparing("first", 1))
    with pytest.raises(StagingFullError) as full:
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
    with pytest.raises(StagingFullError) as full:
        await streams[1].finish()
    assert full.value.metadata == {"push_id": "p1"}
    for stream in streams:
        stream.detach()
    assert (state(rig), state(rig, "p2")) == (PushState.PREPARED, PushState.STAGED)
    await commit(rig)
    await commit(rig, "p2")
    assert rig.engine.live == tensors(2)


@pytest.mark.parametrize("action", [PushAction.PREPARE, PushAction.APPLY])
async def test_one_that_is_preemptible_gives_way(rig: Rig, action: PushAction) -> None:
    """Whoever prepared it has ended, or will find that it is gone."""
    await rig.push(preparing("first", 1, preemptible=True))
    await rig.push(header("second", 2, action=action))
    await until_freed(rig, 1) if action is PushAction.APPLY else await commit(rig, "second")
    with pytest.raises(PushNotFoundError):
        await commit(rig, "first")
    assert rig.engine.live == tensors(2)


async def test_one_that_is_preemptible_waits_beside_bytes_that_are_only_staged(rig: Rig) -> None:
    """They do not need its place."""
    await rig.push(preparing("first", 1, preemptible=True))
    await rig.push(header("second", 2, action=PushAction.STAGE))
    assert (state(rig, "first"), state(rig, "second")) == (PushState.PREPARED, PushState.STAGED)
    await commit(rig, "first")
    assert rig.engine.live == tensors(1)


async def test_of_two_that_were_staged_the_later_one_takes_the_place(rig: Rig) -> None:
    """Both were joined before either was prepared."""
    for version in (1, 2):
        await rig.push(header(f"p{version}", version, action=PushAction.STAGE, attempt="zero"))
    streams = [await rig.registry.open(preparing(f"p{version}", version, preemptible=True)) for version in (1, 2)]
    for version, stream in enumerate(streams, 1):
        send(stream, weights(version))
        assert (await stream.finish()).push.state is PushState.PREPARED
        stream.detach()
    with pytest.raises(PushNotFoundError):
        state(rig, "p1")
    await commit(rig, "p2")
    assert rig.engine.live == tensors(2)


async def test_nothing_else_is_carried_out_while_the_place_is_made(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of the other one are freed in a thread, which takes a while."""
    freeing, go_on, close = threading.Event(), threading.Event(), LivePush.close

    def slow(push: LivePush) -> None:
        freeing.set()
        go_on.wait(STEP_S)
        close(push)

    for version in (1, 2):
        await rig.push(header(f"p{version}", version, action=PushAction.STAGE, attempt="zero"))
    streams = [await rig.registry.open(preparing(f"p{version}", version, preemptible=True)) for version in (1, 2)]
    for version, stream in enumerate(streams, 1):
        send(stream, weights(version))
    await streams[0].finish()
    monkeypatch.setattr(LivePush, "close", slow)
    finishing = asyncio.create_task(streams[1].finish())
    await asyncio.to_thread(freeing.wait, STEP_S)
    with pytest.raises(ApplyInProgressError):  # of whoever says that nobody is at it any more
        rig.registry.discard("p2", force=True)
    go_on.set()
    assert (await finishing).push.state is PushState.PREPARED
    for stream in streams:
        stream.detach()


async def test_repeated_prepare_gets_the_same_answer_without_work(rig: Rig) -> None:
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


async def test_repeated_prepare_after_a_commit_that_was_late_gets_the_same_answer(rig: Rig) -> None:
    """Not that of the commit: the push is prepared, as it was then."""
    prepared = await rig.push(header(action=PushAction.PREPARE, attempt="a"))
    async with rig.pauses.undisturbed(600.0):
        with advanced_clock() as clock, pytest.raises(DeadlineError):
            await after(clock, 60.1, rig.registry.commit("p1", ApplyOptions(timeout_s=60.0)))
    assert await rig.push(header(action=PushAction.PREPARE, attempt="a")) == prepared
    assert rig.engine.calls.count("prepare_weights") == 1
    await rig.registry.commit("p1", ApplyOptions())
    assert rig.engine.live == tensors(1)


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
    rig.engine.weights.takes_arriving = arriving
    hangs = fault == "hangs"
    if hangs:
        rig.engine.hangs.add("prepare_weights")
    else:
        rig.engine.fails["prepare_weights"] = ValueError("no")
    pushing = rig.push(preparing(apply=ApplyOptions(timeout_s=60.0)))
    with advanced_clock() as clock:
        with pytest.raises(DeadlineError if hangs else PushRolledBackError):
            await (after(clock, 61.0, pushing, lambda: is_preparing(rig)) if hangs else pushing)
        await until(lambda: state(rig) is PushState.FAILED)  # at the deadline the client may be told before
    await assert_unchanged(rig)
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
    await assert_unchanged(rig)
    await commit(rig)
    assert rig.engine.calls.count("prepare_weights") == 2
    assert rig.engine.live == tensors(1)


async def test_a_client_that_is_gone_changes_nothing(rig: Rig) -> None:
    """It is prepared all the same, and its state says so."""
    gate = rig.engine.gates["prepare_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(preparing()))
    await gate.reached.wait()
    await until(lambda: is_preparing(rig))
    pushing.cancel()
    await asyncio.wait({pushing})
    gate.open.set()
    await until(lambda: state(rig) is PushState.PREPARED)
    await commit(rig)


async def test_a_part_that_is_still_prepared_is_not_completed_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commit is the exchange alone."""
    await rig.push(preparing("part", 7, manifest=PART), weights(7)[:16])
    monkeypatch.setattr(Staging, "complete", None)
    await commit(rig, "part")
    assert rig.engine.live == {"a": weights(7)[:16], "b": weights(0)[16:]}
    assert rig.engine.calls.count("prepare_weights") == 1


async def test_a_lease_that_is_lost_is_reported(rig: Rig) -> None:
    """It fails as any commit does."""
    await rig.push(preparing())
    with pytest.raises(GenserveError):
        await rig.registry.commit("p1", ApplyOptions(pause_lease_id="gone"))
    await commit(rig)
    assert rig.engine.live == tensors(1)
