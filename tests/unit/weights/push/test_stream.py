"""Streams of a push: what a break leaves, and how several share one outcome."""

import asyncio
from dataclasses import replace

import pytest

from genserve.errors import (
    ApplyInProgressError,
    ChecksumMismatchError,
    ChunkOutOfRangeError,
    InvalidFieldError,
    PushConflictError,
    PushNotFoundError,
    PushTruncatedError,
)
from genserve.tensors.checksum import crc32c_of
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from genserve.weights.push.types import PushAction, PushState
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, turns
from tests.unit.weights.conftest import (
    CHECKPOINT,
    Rig,
    after,
    further,
    header,
    nothing_runs,
    num_arenas,
    send,
    tensors,
    weights,
)

OTHER_MANIFEST = CheckpointIndex(
    dict(CHECKPOINT.tensors) | {"a": CheckpointTensor("F16", (4,), 8)}  # a good one, of another layout
).as_manifest()


async def test_cut_stream_is_resumed_where_it_broke(rig: Rig) -> None:
    """GetPush tells what is missing; sending that finishes the push."""
    await rig.stage_part(header(attempt="a"), 0, 14)
    report = rig.registry.report("p1").push
    assert (report.state, report.missing) == (PushState.RECEIVING, ((14, 32),))
    assert rig.engine.calls == []  # nothing changes before the end frame
    stream = await rig.registry.open(header(attempt="a"))
    send(stream, weights(1), 14)
    assert (await stream.finish()).push.state is PushState.APPLIED
    assert rig.engine.live == tensors(1)


async def test_stream_cut_after_its_last_byte_applies_nothing(rig: Rig) -> None:
    """Only the end frame says that the client wants it; a retry that sends it alone is enough."""
    await rig.stage_part(header(attempt="a"), 0, 32)
    await nothing_runs()
    assert rig.engine.calls == []
    stream = await rig.registry.open(header(attempt="a"))
    assert (await stream.finish()).push.state is PushState.APPLIED


async def test_end_before_every_byte_is_a_truncation(rig: Rig) -> None:
    """It tells how many are missing, nothing is applied, and what came stays for a resume."""
    stream = await rig.registry.open(header(attempt="a"))
    send(stream, weights(1), 0, 20)
    with pytest.raises(PushTruncatedError) as error:
        await stream.finish()
    stream.detach()
    assert error.value.metadata["missing_bytes"] == "12"
    assert rig.registry.report("p1").push.missing == ((20, 32),)
    stream = await rig.registry.open(header(attempt="a"))
    send(stream, weights(1), 20)
    await stream.finish()
    assert rig.engine.live == tensors(1)


async def test_parallel_streams_share_one_outcome(rig: Rig) -> None:
    """The first brings the manifest, the others its digest; who ends early waits for the others."""
    opened = header(num_streams=3)
    streams = [await rig.registry.open(opened)]
    streams += [await rig.registry.open(further(opened)) for _ in range(2)]
    finishing = []
    for index, stream in enumerate(streams):
        send(stream, weights(1), index * 11, min(index * 11 + 11, 32))
        finishing.append(asyncio.create_task(stream.finish()))
        await nothing_runs()
        if index < 2:
            assert not any(task.done() for task in finishing)
    outcomes = await asyncio.gather(*finishing)
    assert outcomes[0].push.state is PushState.APPLIED
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert rig.engine.calls.count("commit_weights 1") == 1


async def test_stream_with_the_digest_may_come_first(rig: Rig) -> None:
    """Trainer ranks race: the one with the manifest need not win."""
    opening = asyncio.create_task(rig.registry.open(further(header(num_streams=2))))
    await turns()
    first = await rig.registry.open(header(num_streams=2))
    second = await opening
    send(first, weights(1))
    await asyncio.gather(first.finish(), second.finish())
    assert rig.engine.live == tensors(1)


async def test_digest_without_a_push_is_not_found_at_last(rig: Rig) -> None:
    """When the manifest never comes, within the time to live that the header gives."""
    with advanced_clock() as clock, pytest.raises(PushNotFoundError):
        await after(clock, 21.0, rig.registry.open(further(header(staging_ttl_s=20.0))))


async def test_digest_of_another_manifest_is_a_conflict(rig: Rig) -> None:
    """A rank with another layout may not write into this push."""
    await rig.stage_part(header(), 0, 10)
    with pytest.raises(PushConflictError):
        await rig.registry.open(replace(header(), manifest=None, manifest_digest=OTHER_MANIFEST.digest))


async def test_parallel_streams_that_all_end_short_are_truncated_together(rig: Rig) -> None:
    """Nobody waits for ever for bytes that no one will send."""
    opened = header(num_streams=2)
    first, second = await rig.registry.open(opened), await rig.registry.open(further(opened))
    send(first, weights(1), 0, 8)
    results = await asyncio.gather(first.finish(), second.finish(), return_exceptions=True)
    assert [type(result) for result in results] == [PushTruncatedError, PushTruncatedError]


async def test_rank_that_waits_learns_that_another_was_cut_off(rig: Rig) -> None:
    """One trainer rank died: the others are told at once, not at the time to live."""
    opened = header(num_streams=2)
    first, second = await rig.registry.open(opened), await rig.registry.open(further(opened))
    send(first, weights(1), 0, 16)
    waiting = asyncio.create_task(first.finish())
    await nothing_runs()
    assert not waiting.done()
    second.detach()
    with pytest.raises(PushTruncatedError):
        await asyncio.wait_for(waiting, STEP_S)


async def test_rank_cut_off_before_its_end_frame_has_not_asked_for_the_push(rig: Rig) -> None:
    """Every byte is there, and one stream has ended: nothing is applied, until the other has ended too."""
    opened = header(num_streams=2, attempt="a")
    first, second = await rig.registry.open(opened), await rig.registry.open(further(opened))
    waiting = asyncio.create_task(first.finish())
    await turns()
    send(second, weights(1))
    second.detach()
    with pytest.raises(PushTruncatedError) as truncated:
        await asyncio.wait_for(waiting, STEP_S)
    assert truncated.value.metadata["missing_bytes"] == "0"
    first.detach()
    assert rig.engine.calls == []
    again = [await rig.registry.open(further(opened)) for _ in range(2)]
    outcomes = await asyncio.gather(*(stream.finish() for stream in again))
    assert outcomes[0].push.state is PushState.APPLIED
    assert rig.engine.live == tensors(1)


async def test_two_equal_headers_at_once_are_one_push(rig: Rig) -> None:
    """A retry that overtakes its original finds it."""
    before = num_arenas()
    first, second = await asyncio.gather(rig.registry.open(header()), rig.registry.open(header()))
    assert num_arenas() == before + 1
    first.detach()
    second.detach()


async def test_bytes_beyond_a_push_that_is_applied_are_refused(rig: Rig) -> None:
    """As while it is sent: its repeat has the same places."""
    await rig.push(header())
    again = await rig.registry.open(header())
    for offset, data in ((-1, b"x"), (31, b"xx"), (32, b"x")):
        with pytest.raises(ChunkOutOfRangeError):
            again.write(offset, data, None)
    again.write(32, b"", None)
    again.write(31, weights(1)[31:], None)
    again.detach()


async def test_a_damaged_chunk_of_a_push_that_is_applied_is_refused(rig: Rig) -> None:
    """As while it is sent: it is not compared, so it is no conflict."""
    await rig.push(header())
    again = await rig.registry.open(header())
    with pytest.raises(ChecksumMismatchError) as error:
        again.write(3, b"xyz", crc32c_of(b"xyz") ^ 1)
    assert error.value.metadata == {"offset": "3"}
    again.detach()


async def test_second_sender_of_claimed_bytes_waits_for_the_first(rig: Rig) -> None:
    """Whether they were written or not: then they are compared, or written."""
    stream = await rig.registry.open(header())
    for written in (False, True):
        claim = stream.claim(8, 16)
        assert claim is not None
        for offset in (0, 24):
            await asyncio.wait_for(stream.wait_unclaimed(offset, 8), STEP_S)
        waiting = asyncio.create_task(stream.wait_unclaimed(16, 16))
        await turns()
        assert not waiting.done()
        claim.target[:] = weights(1)[8:24]
        stream.settle(claim, written=written)
        await asyncio.wait_for(waiting, STEP_S)
        assert not stream.claims
    assert stream.claim(0, 16) is None, "a part of them is there"
    send(stream, weights(1))
    await stream.finish()
    stream.detach()
    assert rig.engine.live == tensors(1)


async def test_nobody_waits_for_a_push_whose_answer_is_known(rig: Rig) -> None:
    """It was applied, or is a dry run, which takes no bytes in any way."""
    await rig.push(header())
    repeat = await rig.registry.open(header())
    dry = await rig.registry.open(header("dry", 2, action=PushAction.VALIDATE))
    for stream in (repeat, dry):
        assert not stream.claims
        await asyncio.wait_for(stream.wait_unclaimed(0, 32), STEP_S)
        expiring = asyncio.create_task(stream.gone.wait())
        await turns()
        assert not expiring.done()
        expiring.cancel()
        stream.detach()
    assert repeat.claim(0, 32) is None
    for field, take in (("segment", lambda: dry.claim(0, 32)), ("chunk", lambda: dry.write(0, b"x", None))):
        with pytest.raises(InvalidFieldError) as caught:
            take()
        assert caught.value.violations[0].field == field


async def test_rank_lost_after_its_end_frame_does_not_end_other_streams(rig: Rig) -> None:
    """It has said that it wants the push, and is counted once, however often it ends: the outcome is that of all."""
    opened = header(num_streams=2)
    first, second = await rig.registry.open(opened), await rig.registry.open(further(opened))
    send(first, weights(1), 0, 16)
    for _ in range(2):
        waiting = asyncio.create_task(first.finish())
        await turns()
        waiting.cancel()
        await asyncio.wait({waiting})
    for _ in range(2):
        first.detach()
    assert rig.registry.report("p1").push.state is PushState.RECEIVING
    with pytest.raises(ApplyInProgressError):
        await rig.registry.open(header("p2", 2))  # somebody sends it still
    send(second, weights(1), 16)
    outcome = await second.finish()
    second.detach()
    assert outcome.push.state is PushState.APPLIED
    assert rig.engine.live == tensors(1)
    await rig.push(header("p2", 2))
