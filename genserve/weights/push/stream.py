"""The streams of a push for the servicers: one that brings bytes, and one whose answer is known."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from genserve.errors import InvalidFieldError, PushConflictError
from genserve.weights.push.attempt import Attempt
from genserve.weights.push.claims import Claim
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.types import PushOutcome


class PushStream(Protocol):
    """One stream of a push, made by `PushRegistry.open`. Call everything on the event loop's thread, and `detach` at
    the end in any case."""

    @property
    def push_id(self) -> str:
        """The id of the push, generated if the header had none."""

    def write(self, offset: int, data: bytes | memoryview, crc32c: int | None) -> None:
        """Stages a chunk at `offset` (bytes), after checking its CRC32C if there is one. Bytes that have arrived
        already, or that are served, are compared.

        Raises ChunkOutOfRangeError, ChecksumMismatchError and StagingFullError, which free nothing, and the error that
        ended the push if it is gone. A PushConflictError for other bytes ends a push that is still being sent: it is
        freed, and all of its streams get the error.
        """

    def is_claimed(self, offset: int, length: int) -> bool:
        """Whether `length` bytes at `offset` must wait, because somebody writes to a part of them."""

    async def wait_settled(self) -> None:
        """Waits until somebody has finished writing to a claimed place."""

    def claim(self, offset: int, length: int) -> Claim | None:
        """The right to write missing bytes outside of the event loop; None if some have arrived, or none are needed:
        then `write` them. Raises as `write`."""

    def settle(self, claim: Claim, *, written: bool) -> None:
        """Ends a claim whose bytes were written, or will not be. Raises the error that ended the push."""

    async def finish(self) -> PushOutcome:
        """Handles PushEnd. Waits until every stream has ended, or no more will come, and the push was carried out. All
        streams of a push get the same outcome. If the caller is cancelled, the push continues.

        Raises PushTruncatedError if bytes or end frames are missing; the bytes that arrived stay staged. Otherwise
        raises as `PushApplier.apply`, PushConflictError, ApplyInProgressError, VersionNotNewerError and
        WeightVersionMismatchError.
        """

    def detach(self) -> None:
        """Ends the stream, regularly or not. Its bytes stay staged until the time to live ends. Safe to call more than
        once."""

    async def wait_expired(self) -> None:
        """Returns if the bytes are freed before the push was carried out: then the stream should end, because `write`
        and `finish` raise. Never returns for a push that needs no bytes."""


class LiveStream:
    """A stream whose bytes go into a push. `ended` is called when it sends its end frame and when it is over;
    `conflicted` when it brings bytes that differ from those there."""

    def __init__(
        self,
        push: LivePush,
        attempt: Attempt,
        ended: Callable[[LivePush], None],
        conflicted: Callable[[LivePush, PushConflictError], None],
    ) -> None:
        self._push = push
        self._attempt = attempt
        self._tell_ended = ended
        self._tell_conflicted = conflicted
        self._sends = True
        self._is_attached = True
        attempt.num_opened += 1
        attempt.num_sending += 1
        attempt.num_attached += 1
        push.num_attached += 1

    @property
    def push_id(self) -> str:
        """Id of the push."""
        return self._push.push_id

    def write(self, offset: int, data: bytes | memoryview, crc32c: int | None) -> None:
        """Stages a chunk."""
        ends_push = self._push.may_conflict and self._attempt is self._push.attempt
        try:
            self._push.write(self._attempt, offset, data, crc32c)
        except PushConflictError as error:
            if ends_push:
                self._tell_conflicted(self._push, error)
            raise

    def is_claimed(self, offset: int, length: int) -> bool:
        """Whether bytes must wait for a claim."""
        return self._push.staging.claims.overlap(offset, offset + length)

    async def wait_settled(self) -> None:
        """Waits for a claim."""
        await self._push.staging.claims.wait_settled()

    def claim(self, offset: int, length: int) -> Claim | None:
        """The right to write missing bytes."""
        return self._push.claim(self._attempt, offset, length)

    def settle(self, claim: Claim, *, written: bool) -> None:
        """The end of a claim."""
        self._push.settle(self._attempt, claim, written=written)

    async def finish(self) -> PushOutcome:
        """Handles PushEnd."""
        if self._sends:
            self._attempt.num_ended += 1
            self._stop_sending()
            self._tell_ended(self._push)
        return await asyncio.shield(self._attempt.result)

    def detach(self) -> None:
        """Ends the stream."""
        if not self._is_attached:
            return
        self._is_attached = False
        self._attempt.num_attached -= 1
        self._push.num_attached -= 1
        self._stop_sending()
        self._tell_ended(self._push)

    async def wait_expired(self) -> None:
        """Returns if the bytes are freed."""
        await self._push.gone.wait()

    def _stop_sending(self) -> None:
        if self._sends:
            self._sends = False
            self._attempt.num_sending -= 1


class AnsweredStream:
    """A stream of a push with a known outcome: it was applied, or it is a dry run. `compare` checks bytes that are sent
    nevertheless; None refuses them."""

    def __init__(
        self, outcome: PushOutcome, compare: Callable[[int, bytes | memoryview, int | None], None] | None = None
    ) -> None:
        self._outcome = outcome
        self._compare = compare

    @property
    def push_id(self) -> str:
        """Id of the push."""
        return self._outcome.push.push_id

    def write(self, offset: int, data: bytes | memoryview, crc32c: int | None) -> None:
        """Compares a chunk. Raises InvalidFieldError in a dry run, PushConflictError for bytes that differ from the
        applied ones."""
        if self._compare is None:
            raise InvalidFieldError.of("chunk", "VALIDATE takes no bytes")
        self._compare(offset, data, crc32c)

    def is_claimed(self, offset: int, length: int) -> bool:
        """Nobody writes."""
        return False

    async def wait_settled(self) -> None:
        """Nothing to wait for."""

    def claim(self, offset: int, length: int) -> Claim | None:
        """Nothing is written; raises as `write`."""
        if self._compare is None:
            raise InvalidFieldError.of("segment", "VALIDATE takes no bytes")
        return None

    def settle(self, claim: Claim, *, written: bool) -> None:
        """Never called, because there is no claim."""
        raise RuntimeError("an answered push has no claims")

    async def finish(self) -> PushOutcome:
        """Returns the known outcome."""
        return self._outcome

    def detach(self) -> None:
        """Does nothing."""

    async def wait_expired(self) -> None:
        """Never returns."""
        await asyncio.Event().wait()


@asynccontextmanager
async def until_expired(stream: PushStream) -> AsyncIterator[None]:
    """Ends its body when the push has expired, without an error: `finish` raises it then."""
    limit = asyncio.timeout(None)

    async def expire() -> None:
        await stream.wait_expired()
        limit.reschedule(asyncio.get_running_loop().time())

    try:
        async with limit:
            watcher = asyncio.create_task(expire())
            try:
                yield
            finally:
                watcher.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
