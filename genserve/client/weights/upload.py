"""Sends one push of weights: makes its frames, streams the bytes, and when a stream breaks, those that are missing."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any, Final

import grpc.aio

from genserve.client.weights.layout import ByteSpace, computes_checksums
from genserve.client.weights.options import Delivery
from genserve.client.weights.results import Push, PushProgress, PushResult
from genserve.client.weights.resumes import RESUME_TIMEOUT_S, Resumes, pauses
from genserve.errors import (
    DeadlineError,
    GenserveError,
    PushNotFoundError,
    PushRolledBackError,
    PushTruncatedError,
    UnavailableError,
)
from genserve.memory.ring import PIECE_BYTES, SharedRing, SpareRings
from genserve.tensors.checksum import crc32c_of
from genserve.tensors.chunk_frame import chunk_frame as encoded_chunk
from genserve.tensors.ranges import Range, common, num_bytes, split
from genserve.transport.channels import PushChannels
from genserve.transport.connection import Connection
from genserve.transport.streams import FinalStatus
from genserve.v1 import weights_pb2
from genserve.wire.conversions import segment_frame

END_FRAME: Final = weights_pb2.PushWeightsRequest(end=weights_pb2.PushEnd()).SerializeToString()

_EXPLAIN_TIMEOUT_S: Final = 5.0
_NUM_NAMED: Final = 3
_PUSH_WEIGHTS: Final = "/genserve.v1.WeightService/PushWeights"


def header_frame(header: weights_pb2.PushHeader) -> bytes:
    """The first frame."""
    return weights_pb2.PushWeightsRequest(header=header).SerializeToString()


def chunk_frame(offset: int, pieces: Sequence[bytes | memoryview], *, checksum: bool) -> bytes:
    """A chunk of the bytes of `pieces` at `offset`, with their CRC32C if there is a fast way to compute it."""
    if not (checksum and computes_checksums()):
        return encoded_chunk(offset, pieces, None)
    computed = 0
    for piece in pieces:
        computed = crc32c_of(piece, computed)
    return encoded_chunk(offset, pieces, computed)


class Upload:
    """Sends one push, or a caller's part of it, until it is done, fails, or its deadline has passed.

    With `rings` the bytes are written to shared memory, and the daemon copies them. If the daemon cannot read it, this
    raises InvalidFieldError naming the segment; call `without_rings` and try again.
    """

    def __init__(
        self,
        connection: Connection,
        header: weights_pb2.PushHeader,
        space: ByteSpace,
        delivery: Delivery,
        *,
        rings: SpareRings | None,
        ingest_ports: Sequence[int],
        timeout_s: float | None,
    ) -> None:
        self._connection = connection
        self._header = header
        self._space = space
        self._delivery = delivery
        self._rings = rings
        self._channels = PushChannels(connection, ingest_ports)
        self._timeout_s = timeout_s
        self._clock = asyncio.get_running_loop().time
        self._started_at = self._clock()
        self._own_bytes = num_bytes(space.ranges)
        self._sent_bytes = 0
        self._resumes = Resumes(self._clock)
        self._reached_daemon = False

    async def run(self) -> PushResult:
        """Sends everything. After a broken or truncated stream it asks for the missing ranges and sends those."""
        validates = self._header.action == weights_pb2.PUSH_ACTION_VALIDATE
        everything: Sequence[Range] = () if validates else self._space.ranges
        missing, least_bytes = everything, num_bytes(everything)
        while True:
            try:
                return await self._until_deadline(missing)
            except (UnavailableError, PushTruncatedError) as error:
                if not self._reached_daemon and not isinstance(error, PushTruncatedError):
                    raise
                known, missing = await self._look_up(error), everything  # bytes of another attempt are compared
                if known is not None:
                    is_own = known.push.attempt == self._header.attempt != ""
                    if known.push.state == "applied" and is_own:  # only the answer was lost
                        return await self._answered(known)
                    if is_own or (known.push.state == "receiving" and not self._header.attempt):
                        missing = common(known.push.missing, everything)
                # A daemon that loses the bytes again and again would be sent them for ever.
                if (missing_bytes := num_bytes(missing)) < least_bytes:
                    least_bytes = missing_bytes
                    self._resumes.progress()
                await self._pause_before_resume(error)

    async def _answered(self, known: PushResult) -> PushResult:
        """The answer to this push that was lost. What GetPush says, `known`, is more: what became known after the
        answer. It has to do if the answer cannot be had, because the push is applied all the same, if not a router
        says that only replicas without requests had applied it."""
        while True:
            try:
                return await self._until_deadline(())
            except UnavailableError as error:
                try:
                    await self._pause_before_resume(error)
                except UnavailableError:
                    return known
            except PushRolledBackError:
                raise
            except GenserveError:
                return known

    async def _pause_before_resume(self, error: GenserveError) -> None:
        """Ends at the deadline. Raises `error` if the push is given up."""
        pause_s, remaining_s = self._resumes.next_pause_s(), self._remaining_s()
        if pause_s is None:
            raise error
        await asyncio.sleep(pause_s if remaining_s is None else min(pause_s, remaining_s))

    async def _until_deadline(self, ranges: Sequence[Range]) -> PushResult:
        """`_send_all` with a deadline. The missing bytes are requested while the streams are open: without streams, the
        bytes of an attempt may not count."""
        sending = asyncio.create_task(self._send_all(ranges))
        try:
            await asyncio.wait({sending}, timeout=self._remaining_s())
            if not sending.done():
                raise await self._explained(self._late())
            return sending.result()
        finally:
            sending.cancel()
            await asyncio.wait({sending})
            del sending  # see genserve.aio

    def _late(self) -> DeadlineError:
        push_id, limit_s = self._header.push_id, self._timeout_s
        message = f"push {push_id!r} did not end within {limit_s:g} s, and may still be applied: GetPush tells"
        return DeadlineError(message, metadata={"push_id": push_id})

    async def _explained(self, error: DeadlineError) -> DeadlineError:
        """Names what other callers did not send, if this is why the deadline passed."""
        if self._delivery.num_callers == 1:
            return error
        request = weights_pb2.GetPushRequest(push_id=self._header.push_id)
        try:
            response = await self._connection.unary(self._connection.weights.GetPush, request, _EXPLAIN_TIMEOUT_S)
        except GenserveError as failure:
            error.add_note(f"what was missing is not known: {failure}")
            return error
        push = Push.of(response.push)
        names = self._space.names(push.missing)
        if push.state != "receiving" or not names or common(push.missing, self._space.ranges):
            return error
        others = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
        return DeadlineError(
            f"nothing was applied: of the {self._delivery.num_callers} callers of push {push.push_id!r} some have not "
            f"sent {num_bytes(push.missing)} bytes of {', '.join(names[:_NUM_NAMED])}{others}",
            metadata={"push_id": push.push_id},
        )

    def without_rings(self) -> None:
        """Sends bytes from now on. Those that the daemon copied already are sent again and compared."""
        self._rings = None

    async def _send_all(self, ranges: Sequence[Range]) -> PushResult:
        """Sends on all streams at once; each gets the outcome. The first stream that fails ends the others."""
        self._sent_bytes = self._own_bytes - num_bytes(ranges)
        headers = self._headers()
        parts = split(ranges, len(headers))
        async with AsyncExitStack() as stack:
            channels = await self._channels.open(len(headers), stack)
            streams = zip(channels, headers, parts, strict=True)
            sending = [asyncio.create_task(self._send(*stream)) for stream in streams]
            try:
                return (await asyncio.gather(*sending))[0]
            finally:
                for task in sending:
                    task.cancel()
                await asyncio.gather(*sending, return_exceptions=True)
                del sending, task  # see genserve.aio

    def _headers(self) -> list[weights_pb2.PushHeader]:
        """One header for each stream; the first one has the manifest."""
        first = weights_pb2.PushHeader()
        first.CopyFrom(self._header)
        first.num_streams = self._delivery.num_streams * self._delivery.num_callers
        further = weights_pb2.PushHeader()
        further.CopyFrom(first)
        further.ClearField("manifest")
        return [first] + [further] * (self._delivery.num_streams - 1)

    async def _send(
        self, channel: grpc.aio.Channel, header: weights_pb2.PushHeader, ranges: Sequence[Range]
    ) -> PushResult:
        """One stream: the header, the bytes of `ranges`, the end."""
        method: Any = channel.stream_unary(
            _PUSH_WEIGHTS, response_deserializer=weights_pb2.PushWeightsResponse.FromString
        )
        remaining_s = self._remaining_s()
        timeout_s = None if remaining_s is None else remaining_s + _EXPLAIN_TIMEOUT_S
        with self._connection.typed_errors():  # the client may have been closed since the channel was opened
            call = method(timeout=timeout_s, metadata=self._connection.metadata)
        status = FinalStatus(call)
        ring = None if self._rings is None else self._rings.take()
        writing = asyncio.create_task(self._write_frames(call, header, ranges, ring))
        # The answer says why the daemon stopped reading: it does not read the ring any more either.
        call.add_done_callback(lambda _, writing=writing: writing.cancel())
        try:
            await asyncio.wait([writing])
            if not writing.cancelled():
                writing.result()
            with self._connection.typed_errors():
                result = PushResult.of(await status.of(call))
            if ring is not None and self._rings is not None:
                self._rings.give_back(ring)
                ring = None
            return result
        finally:
            call.cancel()
            writing.cancel()
            await asyncio.wait([writing])
            del writing  # see genserve.aio
            with suppress(asyncio.CancelledError, grpc.RpcError):
                await call  # gRPC's own task keeps its error, and that the call, until somebody takes it
            if ring is not None:
                ring.close()

    async def _write_frames(
        self,
        call: "grpc.aio.StreamUnaryCall[bytes, Any]",
        header: weights_pb2.PushHeader,
        ranges: Sequence[Range],
        ring: SharedRing | None,
    ) -> None:
        """Writes until the end, or until the daemon has answered. The answer says why it stopped reading."""
        try:
            await call.write(header_frame(header))
            self._reached_daemon = True
            async with aclosing(self._frames(ranges, ring)) as frames:
                await self._write_ahead(call, frames)
            await call.write(END_FRAME)
            await call.done_writing()
        except (asyncio.InvalidStateError, grpc.RpcError):
            return

    async def _frames(
        self, ranges: Sequence[Range], ring: SharedRing | None
    ) -> AsyncGenerator[tuple[bytes, int], None]:
        """Chunks of `ranges` as frames, each with the number of bytes of the weights in it."""
        chunk_bytes = self._delivery.chunk_bytes if ring is None else PIECE_BYTES
        async for offset, parts in self._space.chunks(ranges, chunk_bytes):
            if ring is None:
                frame = chunk_frame(offset, parts, checksum=self._delivery.checksum)
            else:
                frame = segment_frame(offset, await ring.put(parts))
            yield frame, sum(map(len, parts))

    async def _write_ahead(
        self, call: "grpc.aio.StreamUnaryCall[bytes, Any]", frames: AsyncGenerator[tuple[bytes, int], None]
    ) -> None:
        """Makes the next frame while gRPC's threads send the previous one."""
        following = await anext(frames, None)
        while following is not None:
            frame, new_bytes = following
            writing = asyncio.ensure_future(call.write(frame))
            try:
                await asyncio.sleep(0)  # it begins
                following = await anext(frames, None)
            finally:
                try:
                    await writing
                finally:
                    del writing  # see genserve.aio
            self._report(new_bytes)

    async def _look_up(self, error: GenserveError) -> PushResult | None:
        """The state of the push in the daemon; None if it is unknown there. Raises `error` if the daemon cannot be
        asked."""
        remaining_s = self._remaining_s()
        timeout_s = RESUME_TIMEOUT_S if remaining_s is None else min(remaining_s, RESUME_TIMEOUT_S)
        until_s, backoff = self._clock() + timeout_s, pauses()
        request = weights_pb2.GetPushRequest(push_id=self._header.push_id)
        while True:
            try:
                method, left_s = self._connection.weights.GetPush, max(until_s - self._clock(), 0.0)
                response = await self._connection.unary(method, request, left_s, wait_for_ready=True)
                return PushResult.of(response)
            except PushNotFoundError:
                return None
            except DeadlineError:
                raise error from None
            except UnavailableError:
                # This connection broke with that of the push, which noticed it first; or a proxy waits for the daemon.
                if self._clock() + (pause_s := backoff.next_s()) >= until_s:
                    raise error from None
                await asyncio.sleep(pause_s)

    def _remaining_s(self) -> float | None:
        """Seconds until the deadline of the whole push."""
        if self._timeout_s is None:
            return None
        return max(self._started_at + self._timeout_s - self._clock(), 0.0)

    def _report(self, new_bytes: int) -> None:
        self._sent_bytes += new_bytes
        if self._delivery.progress is not None:
            elapsed_s = self._clock() - self._started_at
            sizes = self._sent_bytes, self._own_bytes
            self._delivery.progress(PushProgress(self._header.push_id, *sizes, elapsed_s, self._resumes.num_resumes))
