"""The states of a push and the only transitions between them: one table."""

import enum
import time
from collections.abc import Mapping
from typing import Literal, TypeAlias

from genserve.aio import Change
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


Event: TypeAlias = Literal[
    "joined",  # a stream began a new attempt
    "truncated",  # the attempt ended with bytes missing
    "restored",  # bytes that an earlier attempt staged count again
    "checking",  # every byte has arrived, and every stream has ended
    "staged",  # the bytes passed the checks
    "preparing",  # workers were asked to build the version
    "prepared",  # they have built it, and it waits for a commit
    "unprepared",  # they have freed it
    "applying",  # generation is stopped
    "applied",  # the version is served
    "failed",  # an error occurred, and nothing changed
    "dropped",  # the bytes were freed
]

TRANSITIONS: Mapping[tuple[Event, State], State] = {
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
    """The state of one push. Each event wakes the waiters of `changes`."""

    def __init__(self, *changes: Change) -> None:
        self.state = State.RECEIVING
        """The internal state. Only events change it."""
        self.push_state = PushState.RECEIVING
        """The state on the wire."""
        self.is_busy = False
        """Whether the daemon carries out the push: nobody may change or free its bytes."""
        self.since_s = time.time()
        """When the state began, in Unix seconds. An event that leaves the state as it is does not begin it."""
        self._changes = changes

    @property
    def can_commit(self) -> bool:
        """Whether one attempt has brought every byte, and the push waits for a commit."""
        return self.state in (State.STAGED, State.PREPARED, State.FAILED)

    def go(self, event: Event) -> None:
        """Goes to the next state. Raises RuntimeError if the table has no transition for the event."""
        after = TRANSITIONS.get((event, self.state))
        if after is None:
            raise RuntimeError(f"a push that is {self.state.name} cannot be {event}")
        if after is not self.state:
            self.since_s = time.time()
        self.state = after
        self.push_state = _SHOWN_AS.get(after) or PushState[after.name]
        self.is_busy = after in _BUSY
        for change in self._changes:
            change.notify()
