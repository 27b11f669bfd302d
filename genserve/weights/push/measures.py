"""What became of pushes, as numbers: how they ended, how long their steps took, and for how long generation stood."""

from collections import Counter

from genserve.errors import GenserveError
from genserve.observe.histogram import Histogram
from genserve.weights.push.types import Applied, PushKind

STEPS = ("receive", "verify", "prepare", "pause", "commit", "resume")
STEP_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ROLLED_BACK = "PUSH_ROLLED_BACK"
_UNKNOWN = "INTERNAL"


class PushMeasures:
    """Counted once for each time that the daemon was done with a push. `outcomes`: by kind and by the name of the state
    that it was left in, or the reason of its error. `paused`: seconds without generation, of those that were applied.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[PushKind, str]] = Counter()
        self.steps = {step: Histogram(STEP_BOUNDS_S) for step in STEPS}
        self.paused = Histogram(STEP_BOUNDS_S)

    @property
    def num_rolled_back(self) -> int:
        """Pushes after which the version before was served again."""
        return sum(count for (_, outcome), count in self.outcomes.items() if outcome == _ROLLED_BACK)

    def ended(self, kind: PushKind, state: str) -> None:
        """It waits in this state for what its trainer does next."""
        self.outcomes[kind, state] += 1

    def applied(self, kind: PushKind, applied: Applied) -> None:
        """It is served."""
        self.outcomes[kind, "APPLIED"] += 1
        for timing in applied.timings:
            self.steps[timing.step].add(timing.duration_s)
        if applied.paused_s is not None:
            self.paused.add(applied.paused_s)

    def failed(self, kind: PushKind, error: Exception) -> None:
        """It was not carried out."""
        self.outcomes[kind, error.reason if isinstance(error, GenserveError) else _UNKNOWN] += 1
