"""One attempt at a push: its streams, and the result that all of them get."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from genserve.errors import DeadlineError
from genserve.weights.push.types import PushOutcome

# A step that exceeds the timeout ends at about this time, and its error says more.
_LATE_S = 0.25


@dataclass(slots=True)
class Attempt:
    """The streams of one attempt, and the result that all of them answer. `name` is "" for one without a name.
    `began_at_s`: when it began, in Unix seconds, for people."""

    num_streams: int
    name: str
    result: "asyncio.Future[PushOutcome]"
    began_at_s: float
    num_attached: int = 0
    num_opened: int = 0
    num_sending: int = 0
    num_ended: int = 0

    @classmethod
    def begin(cls, num_streams: int, name: str) -> "Attempt":
        """An attempt that nobody has joined."""
        result: asyncio.Future[PushOutcome] = asyncio.get_running_loop().create_future()
        # If all clients are gone, nobody retrieves the error, and asyncio must not log this.
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        return cls(num_streams, name, result, time.time())

    def answer(self, outcome: PushOutcome | Exception) -> None:
        """Gives all streams the outcome, unless they got one before."""
        if self.result.done():
            return
        if isinstance(outcome, PushOutcome):
            self.result.set_result(outcome)
        else:
            self.result.set_exception(outcome)

    @contextmanager
    def answered_on_time(self, timeout_s: float) -> Iterator[None]:
        """Gives streams a DeadlineError if the block takes longer than `timeout_s`: undoing, or a worker that hangs,
        may take more time."""
        late = DeadlineError(f"applying took longer than {timeout_s:g} s; GetPush tells the outcome")
        timer = asyncio.get_running_loop().call_later(timeout_s + _LATE_S, lambda: self.answer(late))
        try:
            yield
        finally:
            timer.cancel()

    @property
    def is_live(self) -> bool:
        """Whether a stream of the attempt is open and has no result yet."""
        return self.num_attached > 0 and not self.result.done()

    @property
    def has_ended(self) -> bool:
        """Whether every announced stream has sent its end frame."""
        return self.num_ended >= self.num_streams

    @property
    def is_over(self) -> bool:
        """Whether no more bytes can arrive: a stream that was cut off does not return."""
        return self.has_ended or (self.num_opened >= self.num_streams and self.num_sending == 0)
