"""A limit of calls per second. Pure: the caller has the clock."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Rate:
    """A token bucket: `per_s` calls per second, and as many at once as a second has, or one."""

    per_s: float
    _allowance: float = field(init=False)
    _at_s: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._allowance = self._burst

    def take(self, now_s: float) -> float:
        """Takes one call. Returns 0.0 if it is within the limit; else seconds until one is, and nothing is taken."""
        if self._at_s is not None:
            self._allowance = min(self._burst, self._allowance + max(0.0, now_s - self._at_s) * self.per_s)
        self._at_s = now_s
        if self._allowance < 1.0:
            return (1.0 - self._allowance) / self.per_s
        self._allowance -= 1.0
        return 0.0

    @property
    def _burst(self) -> float:
        return max(1.0, self.per_s)
