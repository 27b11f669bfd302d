"""Calls that the daemon seems to refuse once, as one does that is starting behind a proxy."""

from collections import Counter

from clients.conformance.runner.relay import Relay


class RefusedCalls:
    """Ends the first `num_calls` calls of each method with UNAVAILABLE and nothing else, before the daemon has them.
    Expects a client to repeat what may be repeated, and nothing else."""

    def __init__(self, num_calls: int) -> None:
        self._num_calls = num_calls
        self._num_begun: Counter[str] = Counter()

    def relay(self, target: str) -> Relay:
        """That refuses them."""
        return Relay(target, refuses=self._refuses)

    def _refuses(self, method: str) -> bool:
        self._num_begun[method] += 1
        return self._num_begun[method] <= self._num_calls

    def differences(self) -> list[str]:
        """What did not happen, or should not have."""
        if not self._num_begun:
            return ["no call was made"]
        return [
            f"{method} was called {count} times: it must not be repeated"
            for method, count in self._num_begun.items()
            if method.endswith("/Pause") and count > 1
        ]
