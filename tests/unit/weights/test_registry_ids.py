"""What may follow under a push id: after a refusal or a failure, while the push is applied, and afterwards."""

import asyncio
import time
from dataclasses import replace

import pytest

from genserve.errors import (
    ApplyInProgressError,
    ChecksumMismatchError,
    DeadlineError,
    PushConflictError,
    PushNotFoundError,
    PushRolledBackError,
    WeightVersionMismatchError,
)
from genserve.weights.push.types import ApplyOptions, PushAction, PushState
from tests.support.clocks import advanced_clock
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import Rig, after, contents, header, send, tensors, weights
from tests.unit.weights.prepared import commit, is_preparing, preparing, state


async def refuse(rig: Rig, attempt: str) -> None:
    """A push that is in conflict with itself."""
    stream = await rig.registry.open(header(attempt=attempt))
    send(stream, weights(1), 0, 8)
    with pytest.raises(PushConflictError):
        stream.write(0, weights(2)[:8], None)
    stream.detach()


async def test_attempt_after_a_refused_one_is_reported_committed_and_discarded(rig: Rig) -> None:
    """The refusal is told while nothing else is here under that id, and is gone with it."""
    await refuse(rig, "a")
    assert rig.registry.report("p1").push.state is PushState.FAILED
    with pytest.raises(PushConflictError) as conflict:
        await rig.registry.commit("p1", ApplyOptions())
    assert conflict.value.metadata == {"push_id": "p1", "offset": "0"}
    stream = await rig.registry.open(header(attempt="b"))
    send(stream, weights(1), 0, 8)
    report = rig.registry.report("p1").push
    assert (report.state, report.attempt, report.received_bytes) == (PushState.RECEIVING, "b", 8)
    with pytest.raises(ApplyInProgressError):
        await rig.registry.commit("p1", ApplyOptions())
    discarded = rig.registry.discard("p1", force=True).push
    assert (discarded.state, discarded.attempt) == (PushState.RECEIVING, "b")
    stream.detach()
    with pytest.raises(PushNotFoundError):
        rig.registry.report("p1")


async def test_a_refusal_is_forgotten_when_it_is_discarded(rig: Rig) -> None:
    """Its attempt may begin again."""
    await refuse(rig, "a")
    with pytest.raises(PushConflictError):
        await rig.registry.open(header(attempt="a"))
    assert rig.registry.discard("p1").push.state is PushState.FAILED
    await rig.push(header(attempt="a"))
    assert rig.engine.live == tensors(1)


@pytest.mark.parametrize("step", ["prepare_weights", "commit_weights"])
async def test_a_push_that_is_applied_is_not_discarded(rig: Rig, step: str) -> None:
    """Not by force: its bytes are in use. Nor when its time to live is over meanwhile."""
    gate = rig.engine.gates[step] = Gate()
    pushing = asyncio.create_task(rig.push(header(staging_ttl_s=60.0)))
    await gate.reached.wait()
    for force in (False, True):
        with pytest.raises(ApplyInProgressError) as refused:
            rig.registry.discard("p1", force=force)
        assert refused.value.metadata == {"push_id": "p1"}
    with advanced_clock() as clock:
        await clock.advance(61.0)
    gate.open.set()
    assert (await pushing).push.state is PushState.APPLIED


async def test_a_push_that_failed_is_kept_for_its_whole_time_to_live(rig: Rig) -> None:
    """However long it was tried: the trainer needs the time to try again."""
    gate = rig.engine.gates["prepare_weights"] = Gate()
    rig.engine.fails["prepare_weights"] = PushRolledBackError("no")
    pushing = asyncio.create_task(rig.push(header(staging_ttl_s=1000.0)))
    await gate.reached.wait()
    failed_s = time.monotonic()
    gate.open.set()
    with pytest.raises(PushRolledBackError):
        await pushing
    assert rig.registry.live.find("p1").idle_until_s >= failed_s + 1000.0


async def test_what_a_header_expects_is_expected_by_the_commit(rig: Rig) -> None:
    """Unless it says otherwise."""
    await rig.push(header("staged", 5, expected_version=0, action=PushAction.STAGE))
    await rig.push(header("between", 3))
    with pytest.raises(WeightVersionMismatchError):
        await rig.registry.commit("staged", ApplyOptions())
    assert (await rig.registry.commit("staged", ApplyOptions(), expected_version=3)).applied is not None
    assert rig.engine.live == tensors(5)


async def test_what_one_commit_expects_is_not_expected_by_the_next(rig: Rig) -> None:
    """Of the two, the first one was late."""
    await rig.push(preparing("b", 5))
    async with rig.pauses.undisturbed(600.0):
        late = rig.registry.commit("b", ApplyOptions(timeout_s=60.0), expected_version=0)
        with advanced_clock() as clock, pytest.raises(DeadlineError):
            await after(clock, 60.1, late, once=lambda: is_preparing(rig, "b"))
    await rig.push(header("a", 3))
    assert (await rig.registry.commit("b", ApplyOptions())).applied is not None
    assert rig.engine.live == tensors(5)


async def test_a_digest_that_only_a_repeat_says_is_compared_with_what_is_prepared(rig: Rig) -> None:
    """What is prepared stays, because its bytes are not those that the repeat means."""
    await rig.push(preparing())
    with pytest.raises(ChecksumMismatchError):
        await rig.push(replace(preparing(), content_digest=contents(9)))
    assert state(rig) is PushState.PREPARED
    await rig.push(replace(preparing(), content_digest=contents(1)))
    assert (await commit(rig)).applied is not None


async def test_a_stream_whose_push_was_applied_goes_on_with_the_same_bytes_alone(rig: Rig) -> None:
    """They lie in the memory of the served version by then."""
    stream = await rig.registry.open(header())
    send(stream, weights(1))
    await stream.finish()
    send(stream, weights(1), 0, 14)
    with pytest.raises(PushConflictError):
        stream.write(0, weights(2)[:7], None)
    stream.detach()
    assert rig.engine.live == tensors(1)
    assert rig.registry.report("p1").push.state is PushState.APPLIED
