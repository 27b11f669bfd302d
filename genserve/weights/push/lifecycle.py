"""The states of a push and the only ways between them. Pure: one table, and a method for each event."""

import enum
from collections.abc import Mapping

from genserve.weights.push.types import PushState


class Stage(enum.Enum):
    """Where a push is. `PushState` is what the wire tells of it: it has no word for the two that are not there."""

    RECEIVING = "bytes are arriving"
    CHECKING = "every byte is there, and the tensors are compared with each other"
    STAGED = "every byte is there and verified"
    PREPARING = "workers build the version beside the live one"
    APPLYING = "generation stands still while the workers switch"
    APPLIED = "the version is served"
    FAILED = "applying failed, nothing changed, and the bytes are still here"
    GONE = "the bytes were freed"


TRANSITIONS: Mapping[tuple[str, Stage], Stage] = {
    # A stream begins a new attempt.
    ("joined", Stage.RECEIVING): Stage.RECEIVING,
    ("joined", Stage.STAGED): Stage.RECEIVING,
    ("joined", Stage.FAILED): Stage.RECEIVING,
    # The attempt ended with bytes missing; what an earlier one had staged is as it was.
    ("truncated", Stage.RECEIVING): Stage.RECEIVING,
    ("restored", Stage.RECEIVING): Stage.STAGED,
    # Every stream of the attempt has ended and every byte is there; or a commit takes up what is staged.
    ("completed", Stage.RECEIVING): Stage.CHECKING,
    ("completed", Stage.STAGED): Stage.CHECKING,
    ("completed", Stage.FAILED): Stage.CHECKING,
    ("staged", Stage.CHECKING): Stage.STAGED,
    ("preparing", Stage.STAGED): Stage.PREPARING,
    ("applying", Stage.PREPARING): Stage.APPLYING,
    ("applied", Stage.PREPARING): Stage.APPLIED,  # an adapter: nothing is paused
    ("applied", Stage.APPLYING): Stage.APPLIED,
    ("failed", Stage.CHECKING): Stage.FAILED,
    ("failed", Stage.PREPARING): Stage.FAILED,
    ("failed", Stage.APPLYING): Stage.FAILED,
    # Discarded, timed out, in conflict with itself, or in the way of another push.
    ("dropped", Stage.RECEIVING): Stage.GONE,
    ("dropped", Stage.STAGED): Stage.GONE,
    ("dropped", Stage.FAILED): Stage.GONE,
}
"""(event, stage before) -> stage after. What is not here cannot happen."""

_BUSY = frozenset({Stage.CHECKING, Stage.PREPARING, Stage.APPLYING})
_TOLD = {Stage.CHECKING: PushState.RECEIVING, Stage.GONE: PushState.FAILED}


class Lifecycle:
    """The stage of one push. Each method is an event; it raises RuntimeError where the table has no way."""

    def __init__(self) -> None:
        self._stage = Stage.RECEIVING
        self._was_staged = False

    @property
    def stage(self) -> Stage:
        """Where the push is."""
        return self._stage

    @property
    def state(self) -> PushState:
        """What the wire tells."""
        return _TOLD.get(self._stage) or PushState[self._stage.name]

    @property
    def is_busy(self) -> bool:
        """Whether the daemon carries it out: nobody may change its bytes or take it away."""
        return self._stage in _BUSY

    @property
    def can_commit(self) -> bool:
        """Whether one attempt has brought every byte, and the push waits for somebody to apply it."""
        return self._stage in (Stage.STAGED, Stage.FAILED)

    def joined(self) -> None:
        """A stream has begun a new attempt."""
        self._go("joined")

    def truncated(self) -> None:
        """The attempt has ended with bytes missing."""
        self._go("truncated")
        if self._was_staged:
            self._go("restored")

    def completed(self) -> None:
        """Every byte is there, and everybody who sends has said so."""
        self._go("completed")

    def staged(self) -> None:
        """The bytes are good."""
        self._go("staged")
        self._was_staged = True

    def preparing(self) -> None:
        """Workers have been asked to build the version."""
        self._go("preparing")

    def applying(self) -> None:
        """Generation stands still."""
        self._go("applying")

    def applied(self) -> None:
        """The version is served."""
        self._go("applied")

    def failed(self) -> None:
        """Something went wrong on the way, and nothing has changed."""
        self._go("failed")

    def dropped(self) -> None:
        """The bytes are freed."""
        self._go("dropped")

    def _go(self, event: str) -> None:
        after = TRANSITIONS.get((event, self._stage))
        if after is None:
            raise RuntimeError(f"a push that is {self._stage.name} cannot be {event}")
        self._stage = after
