"""The states of a push and the only transitions between them. Pure: one table, and one method per event."""

import enum
import time
from collections.abc import Callable, Mapping

from genserve.weights.push.types import PushState


class State(enum.Enum):
    """The state of a push. `PushState` is the state on the wire, which has no value for the two that are internal."""

    RECEIVING = "bytes are arriving"
    CHECKING = "every byte is there, and the tensors are compared with each other"
    STAGED = "every byte is there and verified"
    PREPARING = "workers build the version beside the live one"
    PREPARED = "the version is built beside the live one and waits for a commit"
    APPLYING = "generation is stopped while the workers exchange the weights"
    APPLIED = "the version is served"
    FAILED = "applying failed or was refused, nothing changed, and the bytes are here until they are in the way"
    GONE = "the bytes were freed"


TRANSITIONS: Mapping[tuple[str, State], State] = {
    # A stream begins a new attempt.
    ("joined", State.RECEIVING): State.RECEIVING,
    ("joined", State.STAGED): State.RECEIVING,
    ("joined", State.PREPARED): State.RECEIVING,
    ("joined", State.FAILED): State.RECEIVING,
    # The attempt ended with bytes missing; bytes that an earlier one staged do not change.
    ("truncated", State.RECEIVING): State.RECEIVING,
    ("restored", State.RECEIVING): State.STAGED,
    # Every stream of the attempt has ended and every byte has arrived; or a commit applies what is staged.
    ("checking", State.RECEIVING): State.CHECKING,
    ("checking", State.STAGED): State.CHECKING,
    ("checking", State.PREPARED): State.CHECKING,
    ("checking", State.FAILED): State.CHECKING,
    ("staged", State.CHECKING): State.STAGED,
    ("preparing", State.STAGED): State.PREPARING,
    ("prepared", State.PREPARING): State.PREPARED,
    # Another update or a sleep came first: workers have freed what they had built.
    ("unprepared", State.PREPARED): State.STAGED,
    ("applying", State.PREPARING): State.APPLYING,
    ("applied", State.PREPARING): State.APPLIED,  # an adapter: nothing is paused
    ("applied", State.APPLYING): State.APPLIED,
    ("failed", State.CHECKING): State.FAILED,
    ("failed", State.STAGED): State.FAILED,  # refused before anything was tried, and nobody asked to keep it
    ("failed", State.PREPARING): State.FAILED,
    ("failed", State.APPLYING): State.FAILED,
    # Discarded, expired, in conflict with itself, or removed for another push.
    ("dropped", State.RECEIVING): State.GONE,
    ("dropped", State.STAGED): State.GONE,
    ("dropped", State.PREPARED): State.GONE,
    ("dropped", State.FAILED): State.GONE,
}
"""(event, state before) -> state after. Other transitions cannot happen."""

_BUSY = frozenset({State.CHECKING, State.PREPARING, State.APPLYING})
_SHOWN_AS = {State.CHECKING: PushState.RECEIVING, State.GONE: PushState.FAILED}


class Lifecycle:
    """The state of one push. Each method is an event, and raises RuntimeError if the table has no transition for it.
    `tell_change` is called after each event."""

    def __init__(self, tell_change: Callable[[], None] = lambda: None) -> None:
        self.state = State.RECEIVING
        """The internal state. Only events change it."""
        self._was_staged = False
        self._tell_change = tell_change
        self._since_s = time.time()

    @property
    def since_s(self) -> float:
        """When the state began, in Unix seconds. An event that leaves the state as it is does not begin it."""
        return self._since_s

    @property
    def push_state(self) -> PushState:
        """The state on the wire."""
        return _SHOWN_AS.get(self.state) or PushState[self.state.name]

    @property
    def is_busy(self) -> bool:
        """Whether the daemon carries out the push: nobody may change or free its bytes."""
        return self.state in _BUSY

    @property
    def can_commit(self) -> bool:
        """Whether one attempt has brought every byte, and the push waits for a commit."""
        return self.state in (State.STAGED, State.PREPARED, State.FAILED)

    def joined(self) -> None:
        """A stream began a new attempt."""
        self._go("joined")

    def truncated(self) -> None:
        """The attempt ended with bytes missing."""
        self._go("truncated")
        if self._was_staged:
            self._go("restored")

    def checking(self) -> None:
        """Every byte has arrived, and every stream has ended."""
        self._go("checking")

    def staged(self) -> None:
        """The bytes passed the checks."""
        self._go("staged")
        self._was_staged = True

    def preparing(self) -> None:
        """Workers were asked to build the version."""
        self._go("preparing")

    def prepared(self) -> None:
        """They have built it, and it waits for a commit."""
        self._go("prepared")

    def unprepared(self) -> None:
        """They have freed it."""
        self._go("unprepared")

    def applying(self) -> None:
        """Generation is stopped."""
        self._go("applying")

    def applied(self) -> None:
        """The version is served."""
        self._go("applied")

    def failed(self) -> None:
        """An error occurred, and nothing changed."""
        self._go("failed")

    def dropped(self) -> None:
        """The bytes were freed."""
        self._go("dropped")

    def _go(self, event: str) -> None:
        after = TRANSITIONS.get((event, self.state))
        if after is None:
            raise RuntimeError(f"a push that is {self.state.name} cannot be {event}")
        if after is not self.state:
            self._since_s = time.time()
        self.state = after
        self._tell_change()
