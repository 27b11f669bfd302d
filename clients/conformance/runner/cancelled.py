"""Whether a driver ends calls that it does not want any more."""

from typing import Final

from clients.conformance.runner.relay import Relay

_NUM_AT_ONCE: Final = 10
_HELD_S: Final = 20.0


class CancelledCalls:
    """Expects that the client cancels so many calls before the last of the others has ended."""

    def __init__(self, num_cancelled: int) -> None:
        self._num_expected = num_cancelled
        self._num_cancelled = 0
        self._in_time = 0

    def relay(self, target: str) -> Relay:
        """That sees them end. It holds answers back until the calls are cancelled: a daemon may be ready with what was
        asked for before a driver on a busy machine gets a CPU."""
        return Relay(target, ended=self.ended, held_s=self._held_s)

    def _held_s(self, num_passed: int) -> float:
        return _HELD_S if num_passed == _NUM_AT_ONCE and self._num_cancelled < self._num_expected else 0.0

    def ended(self, was_cancelled: bool) -> None:
        """A call has. A driver that exits ends what still runs, which is too late."""
        if was_cancelled:
            self._num_cancelled += 1
        else:
            self._in_time = self._num_cancelled

    def differences(self) -> list[str]:
        """What did not happen."""
        if self._in_time == self._num_expected:
            return []
        return [f"{self._in_time} calls were cancelled before the last one ended, not {self._num_expected}"]
