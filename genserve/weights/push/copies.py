"""Copies pieces of a trainer's shared memory into a push, one after the other, in a thread."""

import asyncio
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from genserve.errors import GenserveError
from genserve.memory.ack_pipe import AckPipe
from genserve.memory.segment import Segment, SegmentChunk
from genserve.weights.push.staging import Claim
from genserve.weights.push.stream import PushStream

_MAX_AHEAD = 8


@dataclass(frozen=True, slots=True)
class _Copy:
    """A piece that is being copied. `done` says whether it was copied."""

    stream: PushStream
    claim: Claim
    done: "Future[bool]"


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

    def _copy(self, segment: Segment, pipe: AckPipe | None, chunk: SegmentChunk, target: memoryview) -> bool:
        """Copies in the thread. After a failure it keeps acknowledging pieces, so that the sender does not block before
        it sees the error."""
        try:
            if self._gave_up:
                return False
            segment.copy(chunk, target)
            return True
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
            try:
                copy.stream.settle(copy.claim, written=not cancelled and error is None and copy.done.result())
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
