"""Bytes that do not arrive as they should: nothing of them reaches a worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import grpc.aio
import pytest
import torch

from genserve.errors import (
    ChecksumMismatchError,
    ChunkOutOfRangeError,
    GenserveError,
    ManifestMismatchError,
    PushConflictError,
    PushNotFoundError,
    PushTruncatedError,
)
from genserve.transport.errors import error_of
from genserve.v1 import weights_pb2, weights_pb2_grpc
from tests.support import models, patience
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


@asynccontextmanager
async def refused(subject: Subject, error: type[GenserveError]) -> AsyncIterator[RawPush]:
    """A push that ends with `error` and is discarded."""
    raw = await subject.raw_push()
    with pytest.raises(error):
        yield raw
    await subject.discard()


async def test_a_flipped_bit_is_found(subject: Subject) -> None:
    """DATA_LOSS, whichever bit it is."""
    async with subject.unharmed(before="commit"):
        for position in (0, 4321, -1):
            async with refused(subject, ChecksumMismatchError) as raw:
                half, size = len(raw.data) // 2, len(raw.data)
                header, first, second = raw.frames((0, half), (half, size))
                await raw.send([header, first, flipped(second, position)])


async def test_a_truncated_push_applies_nothing(subject: Subject) -> None:
    """All but one byte, with and without an end frame."""
    async with subject.unharmed(before="commit"):
        for end in (False, True):
            async with refused(subject, PushTruncatedError) as raw:
                await raw.send(raw.frames((0, len(raw.data) - 1)), end=end)


async def test_other_bytes_at_a_place_that_was_sent_before_are_refused(subject: Subject) -> None:
    """Duplicate and overlapping chunks that differ: nobody can know which of the two is meant."""
    async with subject.unharmed(before="commit"):
        for one, other in (((0, 5000), (0, 5000)), ((0, 5000), (4000, 9000)), ((4000, 9000), (0, 5000))):
            async with refused(subject, PushConflictError) as raw:
                header, first, second = raw.frames(one, other)
                for frame in (first, second):
                    frame.chunk.crc32c = google_crc32c.value(frame.chunk.data)
                shared = max(one[0], other[0]) - second.chunk.offset
                second.chunk.data = second.chunk.data[:shared] + b"\xaa" + second.chunk.data[shared + 1 :]
                second.chunk.crc32c = google_crc32c.value(second.chunk.data)
                await raw.send([header, first, second])


async def test_equal_bytes_may_come_twice_and_in_any_order(subject: Subject) -> None:
    """The control of those above: duplicates, overlaps and disorder by themselves do no harm."""
    raw = await subject.raw_push()
    size = len(raw.data)
    await raw.send(raw.frames((size // 2, size), (0, 5000), (0, 5000), (4000, size // 2 + 7), (100, 200)))
    await subject.oracle.holds((raw.header.weight_version, "b"))


async def test_a_chunk_out_of_range_is_refused(subject: Subject) -> None:
    """Across the end, behind it, and where sums overflow."""
    async with subject.unharmed(before="commit"):
        for offset in (-5, 0, 2**63 - 3, 2**64 - 5):
            async with refused(subject, ChunkOutOfRangeError) as raw:
                frames = raw.frames((0, len(raw.data)), (0, 10))
                frames[2].chunk.offset = offset if offset > 2**60 else len(raw.data) + offset
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


async def test_a_manifest_that_contradicts_itself_is_refused(subject: Subject) -> None:
    """At the header: no byte is taken."""
    async with subject.unharmed():
        for spoil in (overlapping, with_hole, twice):
            async with refused(subject, ManifestMismatchError) as raw:
                spoil(raw)
                await raw.send(raw.frames())
            with pytest.raises(PushNotFoundError):
                await subject.client.get_push(raw.header.push_id)


async def test_a_tensor_that_does_not_fit_is_named_before_anything_stops(
    subject: Subject, checkpoints: dict[str, Path]
) -> None:
    """MANIFEST_MISMATCH before a byte is sent: an unknown tensor, one that is missing, a wrong shape, a wrong type."""
    b = models.load_tensors(checkpoints["b"])
    changes: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({"model__layers__7__mlp__what": torch.zeros(2)}, "model.layers.7.mlp.what"),
        ({"model__norm__weight": None}, "model.norm.weight"),
        ({"model__norm__weight": torch.zeros(64, dtype=torch.bfloat16)}, "model.norm.weight"),
        ({"model__norm__weight": torch.zeros(128, dtype=torch.int32)}, "model.norm.weight"),
    ]
    async with subject.unharmed():
        version = await subject.oracle.served_version() + 1
        for change, name in changes:
            with pytest.raises(ManifestMismatchError) as raised:
                await subject.client.push_weights(replaced(b, **change), version=version)
            assert any(name in each.field + each.description for each in raised.value.violations)


async def slowly(
    subject: Subject, raw: RawPush, chunks: list[tuple[int, int]], pause_s: float, *, for_ever: bool
) -> Any:
    """Sends with a pause after each frame, and then perhaps nothing more on an open stream."""

    async def requests() -> AsyncIterator[Frame]:
        for frame in raw.frames(*chunks):
            yield frame
            await patience.slow(pause_s)
        if for_ever:
            await asyncio.Event().wait()
        yield Frame(end=weights_pb2.PushEnd())

    async with grpc.aio.insecure_channel(subject.process.address) as channel:
        try:
            return await answer_of(weights_pb2_grpc.WeightServiceStub(channel).PushWeights(requests(), timeout=60))
        except grpc.aio.AioRpcError as error:
            raise error_of(error, subject.process.address) from error


async def test_a_writer_that_falls_silent_is_ended_and_its_bytes_are_freed(subject: Subject) -> None:
    """Nothing for the time to live, after the header and after a chunk: the stream is ended by the daemon, not by its
    deadline."""
    async with subject.unharmed(before="commit", discards=False):
        for chunks in ([], [(0, 100_000)]):
            raw = await subject.raw_push(ttl_s=1)
            with pytest.raises(PushTruncatedError):
                await slowly(subject, raw, chunks, 0.0, for_ever=True)
    with pytest.raises(PushNotFoundError):
        await subject.client.get_push(raw.header.push_id)


@pytest.mark.long("genserve/weights/push", "genserve/rpc/frames")  # test_links has this on a slow link
async def test_a_slow_writer_that_goes_on_is_let_finish(subject: Subject) -> None:
    """The control: longer than the time to live in all, never as long without a chunk."""
    raw = await subject.raw_push(ttl_s=4)
    step = -(-len(raw.data) // 7)
    chunks = [(start, min(start + step, len(raw.data))) for start in range(0, len(raw.data), step)]
    await slowly(subject, raw, chunks, 0.6, for_ever=False)  # after the header and after each of seven chunks
    await subject.oracle.holds((raw.header.weight_version, "b"))
