"""The frames of a pull: a version, or a push whose bytes may still be arriving, cut into chunks."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from genserve.errors import InvalidFieldError, WeightVersionMismatchError
from genserve.tensors.checksum import crc32c_of
from genserve.tensors.chunk_frame import chunk_frame
from genserve.tensors.manifest import Manifest
from genserve.tensors.ranges import Range
from genserve.v1 import weights_pb2
from genserve.weights.push.types import LoraAdapter
from genserve.wire.conversions import manifest_message

DEFAULT_CHUNK_BYTES = 1 << 20
MAX_CHUNK_BYTES = 64 << 20
# Each is looked at on the event loop, and again whenever bytes arrive.
MAX_RANGES = 4096


class Pullable(Protocol):
    """Bytes to pull. `push_id` names the push that brings them, `origin` whose bytes they are, and `content_digest` is
    that of their contents; "" = unknown. The byte space has `size_bytes`, of which `manifest` places the tensors."""

    @property
    def push_id(self) -> str:
        """The push."""

    @property
    def origin(self) -> str:
        """The origin."""

    @property
    def weight_version(self) -> int:
        """Their version."""

    @property
    def manifest(self) -> Manifest:
        """The tensors."""

    @property
    def content_digest(self) -> str:
        """The digest."""

    @property
    def size_bytes(self) -> int:
        """The size."""

    @property
    def lora(self) -> LoraAdapter | None:
        """The adapter that the tensors are; None = they are weights."""

    def there(self, start: int, end: int) -> Range | None:
        """The first bytes of [start, end) that have arrived; None = none yet. Raises if no more will."""

    async def wait(self) -> None:
        """Returns when more may be there."""

    async def wait_complete(self) -> None:
        """Returns when the sender has confirmed that all of it is there. Raises if it will not."""

    def view(self, start: int, end: int) -> memoryview:
        """Bytes that are there. Call it in a thread, because they may have to be read from a disk. Raises if they are
        gone."""


async def pull_frames(request: weights_pb2.PullWeightsRequest, pulled: Pullable) -> AsyncGenerator[bytes, None]:
    """Header, chunks and end frame as bytes. Raises InvalidFieldError, WeightVersionMismatchError if another version is
    requested, and as `Pullable`."""
    if request.HasField("weight_version") and request.weight_version != pulled.weight_version:
        raise WeightVersionMismatchError(
            f"version {pulled.weight_version} is served, not {request.weight_version}",
            metadata={"weight_version": str(pulled.weight_version)},
        )
    chunk_bytes = request.chunk_bytes or DEFAULT_CHUNK_BYTES
    if chunk_bytes > MAX_CHUNK_BYTES:
        raise InvalidFieldError.of("chunk_bytes", f"must be at most {MAX_CHUNK_BYTES}, is {chunk_bytes}")
    ranges = _ranges(request.ranges, pulled)
    # In a thread: a manifest of a hundred thousand tensors would delay every token stream.
    yield await asyncio.to_thread(header_frame, pulled)
    async for start, end in _in_order_of_arrival(ranges, chunk_bytes, pulled):
        # In a thread: a checkpoint may have to be read from a disk.
        yield await asyncio.to_thread(_chunk, pulled, start, end)
    await pulled.wait_complete()
    yield weights_pb2.PullWeightsResponse(end=weights_pb2.PushEnd()).SerializeToString()


async def _in_order_of_arrival(
    ranges: Sequence[Range], chunk_bytes: int, pulled: Pullable
) -> AsyncGenerator[Range, None]:
    """The bytes of `ranges` in pieces of at most `chunk_bytes`: what is there in order, and what is not when it
    comes."""
    rest = deque(ranges)
    while rest:
        num_absent = 0
        while num_absent < len(rest):
            start, end = rest.popleft()
            there = pulled.there(start, end)
            if there is None:
                rest.append((start, end))
                num_absent += 1
                continue
            first, last = there[0], min(there[1], there[0] + chunk_bytes)
            rest.extendleft(each for each in ((last, end), (start, first)) if each[0] < each[1])
            num_absent = 0
            yield first, last
        if rest:
            await pulled.wait()


def header_frame(pulled: Pullable) -> bytes:
    header = weights_pb2.PushHeader(
        push_id=pulled.push_id,
        weight_version=pulled.weight_version,
        manifest=manifest_message(pulled.manifest),
        manifest_digest=pulled.manifest.digest,
        attempt=pulled.origin,
        content_digest=pulled.content_digest,
    )
    if (lora := pulled.lora) is not None:
        header.lora.lora_name, header.lora.config = lora.lora_name, lora.config
    return weights_pb2.PullWeightsResponse(header=header).SerializeToString()


def _chunk(pulled: Pullable, start: int, end: int) -> bytes:
    data = pulled.view(start, end)
    return chunk_frame(start, [data], crc32c_of(data))


def _ranges(asked: Sequence[weights_pb2.ByteRange], pulled: Pullable) -> list[Range]:
    if len(asked) > MAX_RANGES:
        raise InvalidFieldError.of("ranges", f"must be at most {MAX_RANGES}, are {len(asked)}")
    for index, each in enumerate(asked):
        if not each.start < each.end <= pulled.size_bytes:
            raise InvalidFieldError.of(
                f"ranges[{index}]", f"[{each.start}, {each.end}) is not within the {pulled.size_bytes} bytes"
            )
    whole = (0, pulled.manifest.total_bytes)
    return [(each.start, each.end) for each in asked] or ([whole] if whole[1] else [])
