"""How long to wait before the next attempt. Pure: whoever uses it has the clock."""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """The first wait takes `first_s`, and each one after it twice as long as the one before, up to `longest_s`."""

    first_s: float
    longest_s: float
    _next_s: float | None = None

    def next_s(self) -> float:
        """The wait before the next attempt."""
        wait_s = self.first_s if self._next_s is None else self._next_s
        self._next_s = min(2 * wait_s, self.longest_s)
        return wait_s

    def reset(self) -> None:
        """An attempt has succeeded: the next wait is the first one again."""
        self._next_s = None
