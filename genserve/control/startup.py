"""What the daemon does between its first answer and its first request. Pure."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Startup:
    """`step`: what it does now, for people, since `step_begin_s`; the start began at `begin_s`. Unix times."""

    step: str
    step_begin_s: float
    begin_s: float

    def then(self, step: str, now_s: float) -> Self:
        """After `step` has begun. One that goes on, on another rank say, began when it first did."""
        return self if step == self.step else replace(self, step=step, step_begin_s=now_s)
