"""The streams of a push for the servicers: one that brings bytes, and one whose answer is known."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Protocol

from genserve.errors import InvalidFieldError, PushConflictError
from genserve.weights.push.lifecycle import State
from genserve.weights.push.live_push import Attempt, LivePush
from genserve.weights.push.staging import Claim, check_chunk
from genserve.weights.push.types import PushOutcome


class PushStream(Protocol):
    """One stream of a push, made by `PushRegistry.open`. Call everything on the event loop's thread, and `detach` at
    the end in any case."""

    push_id: str
    """The id of the push, generated if the header had none."""
    claims: Collection[Claim]
    """Places of the push that somebody writes to at this moment."""
    gone: asyncio.Event
    """Set when the bytes are freed before the push was carried out: then the stream should end, because `write` and
    `finish` raise. Never set for a push that needs no bytes."""

    def write(self, offset: int, data: bytes | memoryview, crc32c: int | None) -> None:
        """Stages a chunk at `offset` (bytes), after checking its CRC32C if there is one. Bytes that have arrived
        already, or that are served, are compared.

        Raises ChunkOutOfRangeError, ChecksumMismatchError and StagingFullError, which free nothing, and the error that
        ended the push if it is gone. A PushConflictError for other bytes ends a push that is still being sent: it is
        freed, and all of its streams get the error.
        """

    async def wait_unclaimed(self, offset: int, length: int) -> None:
        """Returns when nobody writes to any of these bytes. `write` or `claim` them before anything else is awaited."""

    def claim(self, offset: int, length: int) -> Claim | None:
        """The right to write missing bytes outside of the event loop; None if some have arrived, or none are needed:
        then `write` them. Raises as `write`."""

    def settle(self, claim: Claim, *, written: bool, verify_s: float = 0.0) -> None:
        """Ends a claim whose bytes were written, or will not be. `verify_s`: seconds that their checksum took. Raises
        the error that ended the push."""

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
        self.push_id = push.push_id
        self.claims: Collection[Claim] = push.staging.claims
        self.gone = push.gone
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

    def write(self, offset: int, data: bytes | memoryview, crc32c: int | None) -> None:
        """Stages a chunk, or compares it once the bytes are all there."""
        push, staging = self._push, self._push.staging
        is_present, state = self._attempt is push.attempt, push.lifecycle.state
        try:
            if is_present and state is State.RECEIVING:
                if staging.write(offset, data, crc32c):
                    push.touched_s = push.clock()
                    if push.arrived.is_awaited:
                        push.arrived.notify()
                return
            self._check_receives()
            check_chunk(offset, data, crc32c, staging.manifest.total_bytes, staging.manifest.tensors)
            if state is State.APPLIED:
                push.compare_served(self._attempt.name, offset, data)  # the arena may be another version's by now
            else:
                staging.compare(offset, data)
        except PushConflictError as error:
            # Bytes that differ end a push unless somebody has begun to apply it.
            if is_present and state in (State.RECEIVING, State.PREPARED):
                self._tell_conflicted(push, error)
            raise

    async def wait_unclaimed(self, offset: int, length: int) -> None:
        """Waits for claims."""
        await self._push.staging.wait_unclaimed(offset, length)

    def claim(self, offset: int, length: int) -> Claim | None:
        """The right to write missing bytes; None if the push is complete."""
        self._check_receives()
        if self._push.lifecycle.state is not State.RECEIVING:
            return None
        return self._push.staging.claim(offset, length)

    def settle(self, claim: Claim, *, written: bool, verify_s: float = 0.0) -> None:
        """The end of a claim."""
        push = self._push
        if push.staging.settle(claim, written=written, verify_s=verify_s):
            push.touch()
        push.arrived.notify()
        push.check_here()

    def _check_receives(self) -> None:
        """Raises what ended the push, and PushConflictError if another attempt has followed while it is sent."""
        push = self._push
        push.check_here()
        if push.lifecycle.state is State.RECEIVING and self._attempt is not push.attempt:
            raise PushConflictError(
                f"another attempt at push {push.push_id!r} has begun", metadata={"push_id": push.push_id}
            )

    async def finish(self) -> PushOutcome:
        """Handles PushEnd."""
        if self._sends:
            self._sends = False
            self._attempt.num_sending -= 1
            self._attempt.num_ended += 1
            self._tell_ended(self._push)
        return await asyncio.shield(self._attempt.result)

    def detach(self) -> None:
        """Ends the stream."""
        if not self._is_attached:
            return
        self._is_attached = False
        self._attempt.num_attached -= 1
        self._push.num_attached -= 1
        if self._sends:
            self._sends = False
            self._attempt.num_sending -= 1
        self._tell_ended(self._push)


class AnsweredStream:
    """A stream of a push with a known outcome: it was applied, or it is a dry run. `compare` checks bytes that are sent
    nevertheless; None refuses them."""

    def __init__(
        self, outcome: PushOutcome, compare: Callable[[int, bytes | memoryview, int | None], None] | None = None
    ) -> None:
        self.push_id = outcome.push.push_id
        self.claims: Collection[Claim] = ()
        self.gone = asyncio.Event()
        self._outcome = outcome
        self._compare = compare

    def write(self, offset: int, data: bytes | memoryview, crc32c: int | None) -> None:
        """Compares a chunk. Raises InvalidFieldError in a dry run, PushConflictError for bytes that differ from the
        applied ones."""
        if self._compare is None:
            raise InvalidFieldError.of("chunk", "VALIDATE takes no bytes")
        self._compare(offset, data, crc32c)

    async def wait_unclaimed(self, offset: int, length: int) -> None:
        """Nothing to wait for."""

    def claim(self, offset: int, length: int) -> Claim | None:
        """Nothing is written; raises as `write`."""
        if self._compare is None:
            raise InvalidFieldError.of("segment", "VALIDATE takes no bytes")
        return None

    def settle(self, claim: Claim, *, written: bool, verify_s: float = 0.0) -> None:
        """Never called, because there is no claim."""
        raise RuntimeError("an answered push has no claims")

    async def finish(self) -> PushOutcome:
        """Returns the known outcome."""
        return self._outcome

    def detach(self) -> None:
        """Does nothing."""


@asynccontextmanager
async def until_expired(stream: PushStream) -> AsyncIterator[None]:
    """Ends its body when the push has expired, without an error: `finish` raises it then."""
    limit = asyncio.timeout(None)

    async def expire() -> None:
        await stream.gone.wait()
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
