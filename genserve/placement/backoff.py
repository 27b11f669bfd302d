"""How long to wait before a replica is started again, and when to give up. Pure: whoever uses it has the clock."""

from dataclasses import dataclass, field
from typing import Final

from genserve.backoff import Backoff

FIRST_S: Final = 0.5
LONGEST_S: Final = 30.0
LONG_LIFE_S: Final = 60.0
"""A replica that has run for so long did not end because it cannot run: the next wait is a short one."""


@dataclass(slots=True)
class RestartBackoff:
    """The waits begin anew after a long life."""

    long_life_s: float = LONG_LIFE_S
    _backoff: Backoff = field(default_factory=lambda: Backoff(FIRST_S, LONGEST_S))

    def after(self, life_s: float) -> float:
        """The wait after an end, `life_s` after the start."""
        if life_s >= self.long_life_s:
            self._backoff.reset()
        return self._backoff.next_s()


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
