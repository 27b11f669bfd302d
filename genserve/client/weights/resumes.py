"""Whether a transfer of weights that broke goes on, and after which pause."""

from collections.abc import Callable
from typing import Final

from genserve.aio import Backoff

MIN_RESUMES: Final = 5
RESUME_TIMEOUT_S: Final = 30.0
"""A daemon that is restarted, or a network that is down for a while, is there again by then."""
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 3.2


def pauses() -> Backoff:
    """Those between attempts to reach a daemon that has broken a transfer off."""
    return Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)


class Resumes:
    """The resumes of one transfer. It is given up when both are used up since its last progress: `MIN_RESUMES`, because
    one attempt may take minutes, and `RESUME_TIMEOUT_S`, because refused connections fail within milliseconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._backoff = pauses()
        self._num_in_vain = 0
        self._ends_s: float | None = None  # the time begins with the first break
        self.num_resumes = 0
        """Of the whole transfer."""

    def progress(self) -> None:
        """More bytes have arrived since the last resume."""
        self._num_in_vain, self._ends_s = 0, None
        self._backoff.reset()

    def next_pause_s(self) -> float | None:
        """The seconds to wait before the next resume; None: the transfer is given up."""
        if self._ends_s is None:
            self._ends_s = self._clock() + RESUME_TIMEOUT_S
        elif self._clock() >= self._ends_s and self._num_in_vain >= MIN_RESUMES:
            return None
        self.num_resumes += 1
        self._num_in_vain += 1
        return self._backoff.next_s()
