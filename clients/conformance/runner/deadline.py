"""Whether a driver tells the daemon of a deadline."""

from clients.conformance.runner.relay import Relay

_GENERATE = "/genserve.v1.GenerationService/Generate"


class Deadline:
    """Expects a call of Generate that has at most so much time."""

    def __init__(self, timeout_ms: int) -> None:
        self._timeout_ms = timeout_ms
        self._found: list[float | None] = []

    def relay(self, target: str) -> Relay:
        """That sees the calls."""
        return Relay(target, began=self.began)

    def began(self, method: str, remaining_s: float | None) -> None:
        """A call has."""
        if method == _GENERATE:
            self._found.append(remaining_s)

    def differences(self) -> list[str]:
        """What did not happen."""
        longest_s = 1.1 * self._timeout_ms / 1000  # gRPC rounds up
        if any(each is not None and each <= longest_s for each in self._found):
            return []
        found = ", ".join("none" if each is None else f"{each:.1f} s" for each in self._found)
        return [f"no call of Generate had a deadline of {self._timeout_ms} ms: {found or 'there was none'}"]
