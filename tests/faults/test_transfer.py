"""Bytes that do not arrive as they should: nothing of them reaches a worker."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import google_crc32c
import grpc.aio
import pytest
import torch

from genserve.client.transport.errors import error_of
from genserve.errors import (
    ChecksumMismatchError,
    ChunkOutOfRangeError,
    GenserveError,
    ManifestMismatchError,
    PushConflictError,
    PushTruncatedError,
)
from genserve.v1 import weights_pb2, weights_pb2_grpc
from tests.support import models
from tests.support.answers import answer_of
from tests.support.raw_push import RawPush, replaced
from tests.support.subject import Subject

Frame = weights_pb2.PushWeightsRequest


def flipped(frame: Frame, position: int) -> Frame:
    """A chunk as it arrives when one bit is turned over on its way: with the checksum of what was sent."""
    frame.chunk.crc32c = google_crc32c.value(frame.chunk.data)
    data = bytearray(frame.chunk.data)
    data[position] ^= 0x10
    frame.chunk.data = bytes(data)
    return frame


@pytest.mark.parametrize("position", [0, 4321, -1])
async def test_a_flipped_bit_is_found(subject: Subject, position: int) -> None:
    """DATA_LOSS, whichever bit it is."""
    raw = await subject.raw_push()
    half, size = len(raw.data) // 2, len(raw.data)
    async with subject.refuses(ChecksumMismatchError, before="commit"):
        header, first, second = raw.frames((0, half), (half, size))
        await raw.send([header, first, flipped(second, position)])


@pytest.mark.parametrize("end", [False, True], ids=["cut off", "ended too early"])
async def test_a_truncated_push_applies_nothing(subject: Subject, end: bool) -> None:
    """All but one byte, with and without an end frame."""
    raw = await subject.raw_push()
    async with subject.refuses(PushTruncatedError, before="commit"):
        await raw.send(raw.frames((0, len(raw.data) - 1)), end=end)


@pytest.mark.parametrize("chunks", [[(0, 5000), (0, 5000)], [(0, 5000), (4000, 9000)], [(4000, 9000), (0, 5000)]])
async def test_other_bytes_at_a_place_that_was_sent_before_are_refused(
    subject: Subject, chunks: list[tuple[int, int]]
) -> None:
    """Duplicate and overlapping chunks that differ: nobody can know which of the two is meant."""
    raw = await subject.raw_push()
    header, first, second = raw.frames(*chunks)
    for frame in (first, second):
        frame.chunk.crc32c = google_crc32c.value(frame.chunk.data)
    shared = max(chunks[0][0], chunks[1][0]) - second.chunk.offset
    second.chunk.data = second.chunk.data[:shared] + b"\xaa" + second.chunk.data[shared + 1 :]
    second.chunk.crc32c = google_crc32c.value(second.chunk.data)
    async with subject.refuses(PushConflictError, before="commit"):
        await raw.send([header, first, second])


async def test_equal_bytes_may_come_twice_and_in_any_order(subject: Subject) -> None:
    """The control of those above: duplicates, overlaps and disorder by themselves do no harm."""
    raw = await subject.raw_push()
    size = len(raw.data)
    await raw.send(raw.frames((size // 2, size), (0, 5000), (0, 5000), (4000, size // 2 + 7), (100, 200)))
    await subject.oracle.holds((raw.header.weight_version, "b"))


@pytest.mark.parametrize("offset", [-5, 0, 2**63 - 3, 2**64 - 5], ids=["across", "behind", "2^63", "2^64"])
async def test_a_chunk_out_of_range_is_refused(subject: Subject, offset: int) -> None:
    """Across the end, behind it, and where sums overflow."""
    raw = await subject.raw_push()
    frames = raw.frames((0, len(raw.data)), (0, 10))
    frames[2].chunk.offset = offset if offset > 2**60 else len(raw.data) + offset
    async with subject.refuses(ChunkOutOfRangeError, before="commit"):
        await raw.send(frames)


def overlapping(raw: RawPush) -> None:
    """Two tensors in one place."""
    raw.header.manifest.tensors[1].offset = raw.header.manifest.tensors[0].offset


def with_hole(raw: RawPush) -> None:
    """Bytes that belong to no tensor."""
    raw.header.manifest.total_bytes += 2
    raw.header.manifest.tensors[-1].offset += 2


def twice(raw: RawPush) -> None:
    """A tensor that occurs twice."""
    raw.header.manifest.tensors.append(raw.header.manifest.tensors[0])


@pytest.mark.parametrize("spoil", [overlapping, with_hole, twice])
async def test_a_manifest_that_contradicts_itself_is_refused(subject: Subject, spoil: Any) -> None:
    """At the header: no byte is taken."""
    raw = await subject.raw_push()
    spoil(raw)
    async with subject.refuses(ManifestMismatchError):
        await raw.send(raw.frames())
    with pytest.raises(GenserveError) as raised:
        await subject.client.get_push(raw.header.push_id)
    assert raised.value.reason == "PUSH_NOT_FOUND"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model__layers__7__mlp__what": torch.zeros(2)}, "model.layers.7.mlp.what"),
        ({"model__norm__weight": None}, "model.norm.weight"),
        ({"model__norm__weight": torch.zeros(64, dtype=torch.bfloat16)}, "model.norm.weight"),
        ({"model__norm__weight": torch.zeros(128, dtype=torch.int32)}, "model.norm.weight"),
    ],
    ids=["unknown", "missing", "wrong shape", "wrong type"],
)
async def test_a_tensor_that_does_not_fit_is_named_before_anything_stops(
    subject: Subject, checkpoints: dict[str, Path], change: dict[str, Any], name: str
) -> None:
    """MANIFEST_MISMATCH before a byte is sent."""
    version = await subject.oracle.served_version() + 1
    tensors = replaced(models.load_tensors(checkpoints["b"]), **change)
    async with subject.refuses(ManifestMismatchError) as raised:
        await subject.client.push_weights(tensors, version=version, push_id=f"does not fit: {name}")
    assert any(name in each.field + each.description for each in raised.value.violations)


async def slowly(raw: RawPush, chunks: list[tuple[int, int]], pause_s: float, *, for_ever: bool) -> Any:
    """Sends with a pause after each frame, and then perhaps nothing more on an open stream."""

    async def requests() -> AsyncIterator[Frame]:
        for frame in raw.frames(*chunks):
            yield frame
            await asyncio.sleep(pause_s)
        if for_ever:
            await asyncio.Event().wait()
        yield Frame(end=weights_pb2.PushEnd())

    async with grpc.aio.insecure_channel(raw._address) as channel:
        try:
            return await answer_of(weights_pb2_grpc.WeightServiceStub(channel).PushWeights(requests(), timeout=60))
        except grpc.aio.AioRpcError as error:
            raise error_of(error, raw._address) from error


@pytest.mark.parametrize("chunks", [[], [(0, 100_000)]], ids=["after the header", "after a chunk"])
async def test_a_writer_that_falls_silent_is_ended_and_its_bytes_are_freed(
    subject: Subject, chunks: list[tuple[int, int]]
) -> None:
    """Nothing for the time to live: the stream is ended by the daemon, not by its deadline."""
    raw = await subject.raw_push(ttl_s=1)
    async with subject.refuses(PushTruncatedError, before="commit", discards=False):
        await slowly(raw, chunks, 0.0, for_ever=True)
    with pytest.raises(GenserveError) as raised:
        await subject.client.get_push(raw.header.push_id)
    assert raised.value.reason == "PUSH_NOT_FOUND"


async def test_a_slow_writer_that_goes_on_is_let_finish(subject: Subject) -> None:
    """The control: longer than the time to live in all, never as long without a chunk."""
    raw = await subject.raw_push(ttl_s=4)
    step = -(-len(raw.data) // 7)
    chunks = [(start, min(start + step, len(raw.data))) for start in range(0, len(raw.data), step)]
    await slowly(raw, chunks, 0.6, for_ever=False)  # after the header and after each of seven chunks
    await subject.oracle.holds((raw.header.weight_version, "b"))
