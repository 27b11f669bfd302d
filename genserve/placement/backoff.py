"""How long to wait before a replica is started again. Pure: who uses it has the clock."""

from dataclasses import dataclass
from typing import Final

FIRST_S: Final = 0.5
LONGEST_S: Final = 30.0
LONG_LIFE_S: Final = 60.0
"""A replica that has run for so long did not end because it cannot run: the next wait is a short one."""


@dataclass(slots=True)
class Backoff:
    """Each wait is twice as long as the one before."""

    first_s: float = FIRST_S
    longest_s: float = LONGEST_S
    long_life_s: float = LONG_LIFE_S
    _next_s: float = 0.0

    def after(self, life_s: float) -> float:
        """The wait after an end, `life_s` after the start."""
        wait_s = self.first_s if life_s >= self.long_life_s else max(self.first_s, self._next_s)
        self._next_s = min(2 * wait_s, self.longest_s)
        return wait_s


@dataclass(slots=True)
class Starts:
    """Tells replicas that can never serve from those that have had bad luck: as long as no replica has served, what is
    wrong is likely to be wrong with all starts."""

    max_failed: int = 3
    has_served: bool = False

    def is_hopeless(self, num_failed: int, exit_status: int | None) -> bool:
        """Whether to give up. `num_failed`: starts of one replica that have failed in a row, the one with this exit
        status included; 2 is that of wrong usage, which another start does not mend."""
        return not self.has_served and (exit_status == 2 or num_failed >= self.max_failed)
