"""The streams that a push comes on, as the servicers see them: one that brings bytes, one whose answer is known."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from genserve.errors import InvalidFieldError, PushConflictError
from genserve.weights.push.attempt import Attempt
from genserve.weights.push.claims import Claim
from genserve.weights.push.lifecycle import Stage
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.types import PushOutcome


class PushStream(Protocol):
    """One stream of a push, made by `PushRegistry.open`. Call everything on the event loop's thread, and `detach`
    at the end in any case."""

    @property
    def push_id(self) -> str:
        """Id of the push, minted when the header had none."""

    def write(self, offset: int, data: bytes | memoryview, crc32c: int | None) -> None:
        """Stages a chunk at `offset` (bytes), after checking its CRC32C if there is one. Bytes that are there already,
        or that are served, are compared.

        Raises ChunkOutOfRangeError, ChecksumMismatchError and StagingFullError, which free nothing, and what ended the
        push if it is gone. PushConflictError for other bytes than those that are there is the end of a push that is
        still being sent: it is freed, and all of its streams are told.
        """

    def is_claimed(self, offset: int, length: int) -> bool:
        """Whether `length` bytes at `offset` have to wait, as somebody writes to a part of them."""

    async def wait_settled(self) -> None:
        """Waits until somebody has finished writing to a claimed place."""

    def claim(self, offset: int, length: int) -> Claim | None:
        """The right to write bytes that are not there, elsewhere than on the event loop; None when some are, or none
        are needed: `write` them. Raises as `write`."""

    def settle(self, claim: Claim, *, written: bool) -> None:
        """The bytes of a claim are there, or will not come. Raises what ended the push."""

    async def finish(self) -> PushOutcome:
        """PushEnd has arrived. Waits until every stream has ended, or no more will come, and the push has been carried
        out; all streams of a push get the same outcome. Cancelling it leaves the push alone: applying goes on.

        Raises PushTruncatedError when bytes or ends are missing; what came stays staged. Otherwise what
        `WeightUpdater.apply` raises, PushConflictError, ApplyInProgressError, VersionNotNewerError and
        WeightVersionMismatchError.
        """

    def detach(self) -> None:
        """The stream is over, ended or cut off. What it brought stays staged until the time to live ends. Safe to call
        more than once."""

    async def wait_expired(self) -> None:
        """Returns when the bytes were freed before the push was carried out: the stream should end, as `write` and
        `finish` raise from then on. Never returns for a push that needs no bytes."""


class LiveStream:
    """A stream whose bytes go into a push. `ended` is called when it has ended, and when it is over; `conflicted` when
    it brought other bytes than those that are there."""

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
        was_receiving = self._push.lifecycle.stage is Stage.RECEIVING and self._attempt is self._push.attempt
        try:
            self._push.write(self._attempt, offset, data, crc32c)
        except PushConflictError as error:
            if was_receiving:
                self._tell_conflicted(self._push, error)
            raise

    def is_claimed(self, offset: int, length: int) -> bool:
        """Whether bytes have to wait."""
        return self._push.staging.claims.overlap(offset, offset + length)

    async def wait_settled(self) -> None:
        """Waits for a claim."""
        await self._push.staging.claims.wait_settled()

    def claim(self, offset: int, length: int) -> Claim | None:
        """The right to write bytes that are not there."""
        return self._push.claim(self._attempt, offset, length)

    def settle(self, claim: Claim, *, written: bool) -> None:
        """The end of a claim."""
        self._push.settle(self._attempt, claim, written=written)

    async def finish(self) -> PushOutcome:
        """PushEnd has arrived."""
        if self._sends:
            self._attempt.num_ended += 1
            self._stop_sending()
            self._tell_ended(self._push)
        return await asyncio.shield(self._attempt.result)

    def detach(self) -> None:
        """The stream is over."""
        if not self._is_attached:
            return
        self._is_attached = False
        self._attempt.num_attached -= 1
        self._push.num_attached -= 1
        self._stop_sending()
        self._tell_ended(self._push)

    async def wait_expired(self) -> None:
        """Returns when the bytes were freed."""
        await self._push.gone.wait()

    def _stop_sending(self) -> None:
        if self._sends:
            self._sends = False
            self._attempt.num_sending -= 1


class AnsweredStream:
    """A stream of a push whose outcome is known: it was applied, or it is a dry run. `compare` is asked about the bytes
    that come all the same; None refuses them."""

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
        """Compares a chunk. Raises InvalidFieldError for one that a dry run brings, PushConflictError for bytes that
        were not applied."""
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
        """Never called, as there is no claim."""
        raise RuntimeError("an answered push has no claims")

    async def finish(self) -> PushOutcome:
        """What is known."""
        return self._outcome

    def detach(self) -> None:
        """Nothing is held."""

    async def wait_expired(self) -> None:
        """Never returns."""
        await asyncio.Event().wait()
