"""Shared memory that a stream of a push hands over: which memory it may be, what of it is open, and what of it is
copied, one piece after the other in a thread, or compared."""

import asyncio
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from genserve.errors import GenserveError, InvalidFieldError
from genserve.memory.ack_pipe import AckPipe
from genserve.memory.daemon_processes import DaemonProcesses
from genserve.memory.segment import Segment, SegmentChunk
from genserve.net import is_local
from genserve.weights.push.staging import Claim
from genserve.weights.push.stream import PushStream

_WRITTEN_AT_ONCE_BYTES = 1 << 20
_MAX_AHEAD = 8


@dataclass(frozen=True, slots=True)
class _Copy:
    """A piece that is being copied. `done`: the seconds that its checksum took; None if it was not copied."""

    stream: PushStream
    claim: Claim
    done: "Future[float | None]"


class CopyQueue:
    """The pieces that are on their way. Use it on the event loop, and `close` at the end in any case."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "segments")
        self._copies: deque[_Copy] = deque()
        self._gave_up = False
        self._error: BaseException | None = None
        self._settled = asyncio.Event()

    def put(
        self, stream: PushStream, claim: Claim, chunk: SegmentChunk, segment: Segment, pipe: AckPipe | None
    ) -> None:
        """Copies a piece to the claimed place, soon, and acknowledges it; the claim is settled then, or at once if no
        thread can be had, which raises RuntimeError."""
        try:
            done = self._thread.submit(self._copy, segment, pipe, chunk, claim.target)
        except BaseException:  # nobody writes there
            stream.settle(claim, written=False)
            raise
        self._copies.append(_Copy(stream, claim, done))
        loop = asyncio.get_running_loop()
        done.add_done_callback(lambda _: loop.call_soon_threadsafe(self._settle))

    async def wait_room(self) -> None:
        """Returns when one more piece may be put. Raises what went wrong with one before."""
        await self._wait(_MAX_AHEAD - 1)

    async def wait_empty(self) -> None:
        """Returns when nothing is on its way. Raises what went wrong."""
        await self._wait(0)

    def cancel(self) -> None:
        """Pieces that have not been begun are not copied."""
        for copy in self._copies:
            copy.done.cancel()

    async def close(self) -> None:
        """Returns when the thread is at no piece any more."""
        await self._until_left(0)
        self._thread.shutdown(wait=False)

    def _copy(self, segment: Segment, pipe: AckPipe | None, chunk: SegmentChunk, target: memoryview) -> float | None:
        """Copies in the thread. After a failure it keeps acknowledging pieces, so that the sender does not block before
        it sees the error."""
        try:
            return None if self._gave_up else segment.copy(chunk, target)
        except BaseException:
            self._gave_up = True
            raise
        finally:
            if pipe is not None:
                pipe.acknowledge()

    def _settle(self) -> None:
        """What has been copied is there."""
        while self._copies and self._copies[0].done.done():
            copy = self._copies.popleft()
            cancelled = copy.done.cancelled()
            error = None if cancelled else copy.done.exception()
            verify_s = None if cancelled or error is not None else copy.done.result()
            try:
                copy.stream.settle(copy.claim, written=verify_s is not None, verify_s=verify_s or 0.0)
            except GenserveError as gone:
                error = error or gone
            if error is not None and self._error is None:
                self._error = error.with_traceback(None)  # its frames would hold the memory
        self._settled.set()

    async def _wait(self, num_left: int) -> None:
        await self._until_left(num_left)
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None

    async def _until_left(self, num_left: int) -> None:
        """Waits until at most this many pieces are being copied."""
        while len(self._copies) > num_left:
            self._settled.clear()
            await self._settled.wait()


@dataclass(frozen=True, slots=True)
class OwnRing:
    """The memory of a process of the daemon's, and the pipe on which it gets acknowledgements."""

    path: str
    ack_path: str


@dataclass(frozen=True, slots=True)
class SegmentRules:
    """Whose memory a stream may hand over. `peer`: its client, as gRPC writes it; "" = nobody. `own`: the stream comes
    from a process of the `daemon`, and only this is its memory."""

    peer: str = ""
    daemon: DaemonProcesses = field(default_factory=DaemonProcesses)
    own: OwnRing | None = None

    def reader(self) -> "SegmentReader":
        """For a stream that hands over memory. Raises InvalidFieldError if it may not: the daemon would read for a
        client on another host what that client may not read."""
        if self.own is None and not is_local(self.peer):
            raise _refused()
        return SegmentReader(self.daemon, self.own)


def _refused() -> InvalidFieldError:
    return InvalidFieldError.of("segment", "only a client on the daemon's host may send shared memory")


class SegmentReader:
    """What one stream hands over: any memory that `Segment` opens and no process of the `daemon` has open; or `own`,
    which is of such a process, and no other. Keeps what was named last open.

    Pieces are copied in their order by a thread, which acknowledges them too: while it is at one, the event loop
    takes the frame of the next. Use the rest on the event loop, and `close` at the end in any case.
    """

    def __init__(self, daemon: DaemonProcesses, own: OwnRing | None = None) -> None:
        self._own = own
        self._others = daemon if own is None else None
        self._segment: Segment | None = None
        self._pipe: AckPipe | None = None
        self._copies = CopyQueue()

    async def take(self, stream: PushStream, chunk: SegmentChunk) -> None:
        """Starts to stage a piece of shared memory.

        Raises InvalidFieldError for memory or a pipe that may not be used, and as `PushStream.write`, for this piece or
        an earlier one; these errors change nothing.
        """
        await self._copies.wait_room()
        segment, pipe = await self._open(chunk.path), await self._open_pipe(chunk)
        segment.check(chunk)
        await stream.wait_unclaimed(chunk.offset, chunk.length)
        claim = stream.claim(chunk.offset, chunk.length)
        if claim is not None:
            self._copies.put(stream, claim, chunk, segment, pipe)
            return
        await self.finish()
        await self._compare(stream, segment, chunk)
        if pipe is not None:
            pipe.acknowledge()

    async def finish(self) -> None:
        """Waits until every piece was copied. Raises as `take`."""
        await self._copies.wait_empty()

    async def close(self) -> None:
        """Closes the memory and the pipe. Pieces that were not copied may be lost."""
        self._copies.cancel()
        # Descriptors may only be closed when nobody uses them, even if the caller is cancelled.
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        await self._copies.close()
        self._close_segment()
        self._close_pipe()

    async def _compare(self, stream: PushStream, segment: Segment, chunk: SegmentChunk) -> None:
        """Writes a piece as a chunk, if some of its bytes are there already or are not needed."""
        data = memoryview(await asyncio.to_thread(segment.read, chunk))
        for start in range(0, len(data), _WRITTEN_AT_ONCE_BYTES):
            piece = data[start : start + _WRITTEN_AT_ONCE_BYTES]
            await stream.wait_unclaimed(chunk.offset + start, len(piece))
            stream.write(chunk.offset + start, piece, None)
            await asyncio.sleep(0)

    async def _open(self, path: str) -> Segment:
        if self._own is not None and path != self._own.path:
            raise _refused()
        if self._segment is None or not self._segment.is_at(path):
            await self.finish()
            self._close_segment()
            self._segment = Segment.open(path, self._others)
        return self._segment

    async def _open_pipe(self, chunk: SegmentChunk) -> AckPipe | None:
        if self._own is not None and chunk.ack_path != self._own.ack_path:
            raise InvalidFieldError.of("segment.taken_path", "is not the pipe that belongs to the memory")
        if not chunk.ack_path:
            return None
        if self._pipe is None or not self._pipe.is_at(chunk.ack_path):
            await self.finish()
            self._close_pipe()
            self._pipe = await AckPipe.open(chunk.ack_path, chunk.path, self._others)
        return self._pipe

    def _close_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
