"""One attempt at a push: its streams, and the result that all of them answer."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from genserve.errors import DeadlineError
from genserve.weights.push.types import PushOutcome

# A step that runs into the timeout ends about then, and says more.
_LATE_S = 0.25


@dataclass(slots=True)
class Attempt:
    """The streams of one attempt, and the result that all of them answer. `name` is "" for one without a name."""

    num_streams: int
    name: str
    result: "asyncio.Future[PushOutcome]"
    num_attached: int = 0
    num_opened: int = 0
    num_sending: int = 0
    num_ended: int = 0

    @classmethod
    def begin(cls, num_streams: int, name: str) -> "Attempt":
        """An attempt that nobody has joined."""
        result: asyncio.Future[PushOutcome] = asyncio.get_running_loop().create_future()
        # When every client has gone nobody asks for the error; asyncio shall not complain about that.
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        return cls(num_streams, name, result)

    def answer(self, outcome: PushOutcome | Exception) -> None:
        """Tells all streams what came of it, unless they were told before."""
        if self.result.done():
            return
        if isinstance(outcome, PushOutcome):
            self.result.set_result(outcome)
        else:
            self.result.set_exception(outcome)

    @contextmanager
    def told_on_time(self, timeout_s: float) -> Iterator[None]:
        """Those who wait for the result get DeadlineError when the block takes longer: what is being undone, or hangs,
        may take a while yet."""
        late = DeadlineError(f"applying took longer than {timeout_s:g} s; GetPush tells the outcome")
        timer = asyncio.get_running_loop().call_later(timeout_s + _LATE_S, lambda: self.answer(late))
        try:
            yield
        finally:
            timer.cancel()

    @property
    def is_live(self) -> bool:
        """Whether a stream of it is here that has not been told the result."""
        return self.num_attached > 0 and not self.result.done()

    @property
    def has_ended(self) -> bool:
        """Whether every stream that was announced has sent its end frame."""
        return self.num_ended >= self.num_streams

    @property
    def is_over(self) -> bool:
        """Whether no more bytes are to be expected: a stream that was cut off does not come back by itself."""
        return self.has_ended or (self.num_opened >= self.num_streams and self.num_sending == 0)
