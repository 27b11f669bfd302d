"""What the daemon does between its first answer and its first request. Pure."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Startup:
    """`step`: what it does now, for people, since `step_begin_s`; the start began at `begin_s`. Unix times."""

    step: str
    step_begin_s: float
    begin_s: float

    def described(self, now_s: float) -> str:
        """The step, and how long it and the steps before have taken, for people."""
        step_s, all_s = (max(0.0, now_s - each) for each in (self.step_begin_s, self.begin_s))
        since = f" ({all_s:.0f} s since the start)" if self.begin_s != self.step_begin_s else ""
        return f"{self.step}, for {step_s:.0f} s{since}"

    def then(self, step: str, now_s: float) -> Self:
        """After `step` has begun. One that goes on, on another rank say, began when it first did."""
        return self if step == self.step else replace(self, step=step, step_begin_s=now_s)
