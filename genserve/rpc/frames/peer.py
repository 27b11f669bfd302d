"""A version that another daemon has, fetched with PullWeights, whose frames are those of a push."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TypeAlias

import grpc.aio

from genserve.errors import (
    ChecksumMismatchError,
    ChunkOutOfRangeError,
    InvalidFieldError,
    ManifestMismatchError,
    PushTruncatedError,
)
from genserve.rpc.frames.pull import MAX_RANGES
from genserve.rpc.frames.push import Frame, frame_parser, read_chunks, read_header
from genserve.security.caller import Caller, TokenError
from genserve.security.files import CertificateError
from genserve.tensors.manifest import Manifest
from genserve.tensors.ranges import Range
from genserve.v1 import weights_pb2
from genserve.weights.load.types import Offer, SourceError, SourceSilentError
from genserve.weights.push.segments import SegmentRules
from genserve.weights.push.stream import PushStream
from genserve.wire.conversions import manifest_of

Call: TypeAlias = "grpc.aio.UnaryStreamCall[weights_pb2.PullWeightsRequest, Frame]"

STALL_TIMEOUT_S = 10.0
_METHOD = "/genserve.v1.WeightService/PullWeights"
_MAX_FRAME_BYTES = 64 << 20  # as what a daemon takes from a client; a chunk has 1 MiB
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # A peer that vanishes without closing the connection is noticed.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    ("grpc.use_local_subchannel_pool", 1),  # the connection ends with the channel
)


class PeerSource:
    """The version that the daemon at `address` serves, or its push `push_id`. `peers` calls it.

    `max_header_bytes` bounds what it may say of its tensors, None = not; `check_num_tensors` raises
    ManifestMismatchError for too many.
    """

    def __init__(
        self,
        peers: Caller,
        address: str,
        push_id: str,
        max_header_bytes: int | None,
        check_num_tensors: Callable[[int], None],
    ) -> None:
        self._peers = peers
        self._address = address
        self._push_id = push_id
        self._parse = frame_parser(max_header_bytes)
        # gRPC holds a frame in memory before anybody can refuse it.
        max_frame_bytes = max(_MAX_FRAME_BYTES, max_header_bytes or 0)
        self._options = (*_OPTIONS, ("grpc.max_receive_message_length", max_frame_bytes))
        self._check_num_tensors = check_num_tensors

    @property
    def name(self) -> str:
        """The address."""
        return self._address

    @asynccontextmanager
    async def open(self, missing: tuple[Range, ...] | None, weight_version: int) -> AsyncIterator[Offer]:
        """Begins to pull, and reads the header."""
        request = weights_pb2.PullWeightsRequest(push_id=self._push_id)
        if weight_version and not self._push_id:
            request.weight_version = weight_version
        if missing is not None:
            for start, end in _asked(missing):
                request.ranges.add(start=start, end=end)
        with _of_the_peer():
            opened = self._peers.aio_channel(self._address, self._options)
        async with opened as channel:
            pull: grpc.aio.UnaryStreamMultiCallable[weights_pb2.PullWeightsRequest, Frame] = channel.unary_stream(
                _METHOD, weights_pb2.PullWeightsRequest.SerializeToString, response_deserializer=self._parse
            )
            call: Call = pull(request, metadata=self._peers.metadata)
            async with aclosing(_frames(call)) as frames:
                with _of_the_peer():
                    header = await read_header(frames)
                    if header.HasField("lora"):
                        raise SourceError(f"push {header.push_id!r} has brought an adapter there, and no weights")
                    self._check_num_tensors(len(header.manifest.tensors))
                    if weight_version not in (0, header.weight_version):
                        raise SourceError(f"it has version {header.weight_version}, not {weight_version}")
                    # In a thread: a manifest of a hundred thousand tensors would delay every token stream.
                    offer = _Pulled(header, await asyncio.to_thread(manifest_of, header.manifest), frames)
                yield offer


def _asked(missing: tuple[Range, ...]) -> Iterator[Range]:
    """Ranges that a peer takes, with all that is missing: what is sent again is compared."""
    yield from missing[: MAX_RANGES - 1]
    if rest := missing[MAX_RANGES - 1 :]:
        yield rest[0][0], rest[-1][1]
    if not missing:
        yield 0, 1  # without any range everything would be sent


class _Pulled:
    """The offer of a peer."""

    def __init__(self, header: weights_pb2.PushHeader, manifest: Manifest, frames: AsyncIterator[Frame]) -> None:
        self.weight_version = header.weight_version
        self.manifest = manifest
        self.origin = header.attempt
        self.content_digest = header.content_digest
        # Not the push's id: on one peer it may be that of a push that was sent again, with other bytes.
        self.identity = header.attempt or header.content_digest
        self._frames = frames

    async def send(self, stream: PushStream) -> None:
        """Writes chunks until the end frame."""
        with _of_the_peer():
            await read_chunks(self._frames, stream, SegmentRules())


async def _frames(call: Call) -> AsyncGenerator[Frame, None]:
    """The frames of a pull. Raises SourceError when it fails or stalls."""
    frames, silence = aiter(call), SourceError
    try:
        while True:
            async with asyncio.timeout(STALL_TIMEOUT_S):
                frame = await anext(frames, None)
            if frame is None:
                return
            silence = SourceSilentError
            yield frame
    except TimeoutError:
        raise silence(f"it sent nothing for {STALL_TIMEOUT_S:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise SourceError(f"it answered {error.code().name}: {error.details()}") from None
    finally:
        call.cancel()


@contextmanager
def _of_the_peer() -> Iterator[None]:
    """Errors that show that the peer, or the way from it, is at fault."""
    try:
        yield
    except (ChecksumMismatchError, ChunkOutOfRangeError, InvalidFieldError, ManifestMismatchError) as error:
        raise SourceError(error.message) from None
    except (CertificateError, TokenError) as error:
        raise SourceError(f"it cannot be called: {error}") from None
    except PushTruncatedError:
        raise SourceError("its stream ended without an end frame") from None
