"""Whether a driver ends calls that it does not want any more."""

from clients.conformance.runner.relay import Relay


class CancelledCalls:
    """Expects that the client cancels so many calls before the last of the others has ended."""

    def __init__(self, num_cancelled: int) -> None:
        self._num_expected = num_cancelled
        self._num_cancelled = 0
        self._in_time = 0

    def relay(self, target: str) -> Relay:
        """That sees them end."""
        return Relay(target, ended=self.ended)

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
