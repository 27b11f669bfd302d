"""The streams that one push comes on, and when they are over."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from genserve.errors import ApplyInProgressError, DeadlineError, InvalidFieldError, PushNotFoundError
from genserve.weights.claims import Claim
from genserve.weights.push import PushOutcome, PushState
from genserve.weights.session import PushSession

# A step that runs into the timeout ends about then, and says more.
_LATE_S = 0.25


@dataclass(slots=True)
class Round:
    """One attempt at delivering a push, over `num_streams` streams. `result` is what all of them answer."""

    num_streams: int
    result: "asyncio.Future[PushOutcome]"
    num_opened: int = 0
    num_sending: int = 0
    num_ended: int = 0

    @classmethod
    def begin(cls, num_streams: int) -> "Round":
        """A round that nobody has joined."""
        result: asyncio.Future[PushOutcome] = asyncio.get_running_loop().create_future()
        # When every client has gone nobody asks for the error; asyncio shall not complain about that.
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        return cls(num_streams, result)

    @contextmanager
    def told_on_time(self, timeout_s: float) -> Iterator[None]:
        """Those who wait for the result get DeadlineError when the block takes longer: what is being undone, or hangs,
        may take a while yet."""

        def tell() -> None:
            if not self.result.done():
                self.result.set_exception(
                    DeadlineError(f"applying took longer than {timeout_s:g} s; GetPush tells what became of it")
                )

        timer = asyncio.get_running_loop().call_later(timeout_s + _LATE_S, tell)
        try:
            yield
        finally:
            timer.cancel()

    @property
    def is_over(self) -> bool:
        """Whether no more bytes are to be expected: a stream that was cut off does not come back into its round."""
        return self.num_ended >= self.num_streams or (self.num_opened >= self.num_streams and self.num_sending == 0)


@dataclass(slots=True)
class LivePush:
    """A push whose bytes are here. `size_bytes`: memory that it takes, completed if it is partial; `applying`: the task
    that carries it out; `gone` is set when its bytes are freed before that."""

    session: PushSession
    round: Round
    size_bytes: int
    applying: "asyncio.Task[None] | None" = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_held(self) -> bool:
        """Whether somebody is at it: it may not be discarded."""
        return self.applying is not None or self.session.num_attached > 0

    def in_progress(self) -> ApplyInProgressError:
        """What others are told, who would change the weights as well."""
        push_id = self.session.push_id
        return ApplyInProgressError(
            f"push {push_id!r} is under way ({self.session.state.value})",
            metadata={"push_id": push_id},
            retry_after_s=1.0,
        )


class PushStream:
    """One stream of a push, made by `PushRegistry.open`. Call everything on the event loop's thread, and `detach`
    at the end in any case."""

    def __init__(
        self, push_id: str, push: LivePush | None, answer: PushOutcome | None, ended: Callable[[], None]
    ) -> None:
        """`answer` is what is known already; `ended` is called when the stream has ended or was cut off."""
        self._push_id = push_id
        self._push = push
        self._answer = answer
        self._tell_ended = ended
        self._sends = True
        self._attached = push is not None
        if push is not None:
            self._round = push.round
            self._round.num_opened += 1
            self._round.num_sending += 1
            push.session.num_attached += 1

    @classmethod
    def of_outcome(cls, outcome: PushOutcome) -> "PushStream":
        """A stream that needs no bytes: what it answers is known."""
        return cls(outcome.push.push_id, None, outcome, lambda: None)

    @property
    def push_id(self) -> str:
        """Id of the push, minted when the header had none."""
        return self._push_id

    def write(self, offset: int, data: bytes | memoryview, crc32c: int | None) -> None:
        """Stages a chunk at `offset` (bytes), after checking its CRC32C if there is one. The bytes of a push that is
        applied already are ignored.

        Raises ChunkOutOfRangeError, ChecksumMismatchError, PushConflictError for other bytes than those sent before,
        StagingFullError, and PushNotFoundError when the push has timed out. None of them frees what is staged.
        """
        push = self._live("chunk")
        if push is not None:
            push.session.write(offset, data, crc32c)

    def is_claimed(self, offset: int, length: int) -> bool:
        """Whether `length` bytes at `offset` have to wait, as somebody writes to a part of them."""
        return self._push is not None and self._push.session.claims.overlap(offset, offset + length)

    async def wait_settled(self) -> None:
        """Waits until somebody has finished writing to a claimed place."""
        if self._push is not None:
            await self._push.session.claims.wait_settled()

    def claim(self, offset: int, length: int) -> Claim | None:
        """The right to write bytes that are not there, elsewhere than on the event loop; None when some are, or none
        are needed: `write` them. Raises as `write`."""
        push = self._live("segment")
        return None if push is None else push.session.claim(offset, length)

    def settle(self, claim: Claim, *, written: bool) -> None:
        """The bytes of a claim are there, or will not come. Raises PushNotFoundError when the push has timed out."""
        assert self._push is not None  # whose claim it is
        self._push.session.settle(claim, written=written)
        self._live("segment")

    def _live(self, frame: str) -> LivePush | None:
        """The push that bytes go to; None when it needs none."""
        if self._push is None:
            if self._answer is not None and self._answer.push.state is PushState.VALID:
                raise InvalidFieldError.of(frame, "VALIDATE takes no bytes")
            return None
        if self._push.gone.is_set():
            raise PushNotFoundError(f"push {self._push_id!r} has timed out", metadata={"push_id": self._push_id})
        return self._push

    async def finish(self) -> PushOutcome:
        """PushEnd has arrived. Waits until every byte is there, or no more will come, and the push has been carried
        out; all streams of a push get the same outcome. Cancelling it leaves the push alone: applying goes on.

        Raises PushTruncatedError when bytes are missing; those that came stay staged. Otherwise what
        `WeightUpdater.apply` raises, ApplyInProgressError, VersionNotNewerError and WeightVersionMismatchError.
        """
        if self._answer is not None:
            return self._answer
        if self._sends:
            self._round.num_ended += 1
            self._stop_sending()
        return await asyncio.shield(self._round.result)

    def detach(self) -> None:
        """The stream is over, ended or cut off. What it brought stays staged until the time to live ends. Safe to call
        more than once."""
        if self._push is None or not self._attached:
            return
        self._attached = False
        self._push.session.num_attached -= 1
        self._stop_sending()

    async def wait_expired(self) -> None:
        """Returns when the bytes were freed because nothing came for the push's time to live: the stream should end, as
        `write` and `finish` raise from then on. Never returns for a push that needs no bytes."""
        await (self._push.gone if self._push is not None else asyncio.Event()).wait()

    def _stop_sending(self) -> None:
        if self._sends and self._push is not None:
            self._sends = False
            self._round.num_sending -= 1
            self._push.session.touch()
            self._tell_ended()
