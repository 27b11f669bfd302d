"""What a policy is."""

from collections.abc import Sequence
from typing import Final, Protocol

from genserve.routing.replica import Replica, Request

MAX_CANDIDATES: Final = 3
"""The most replicas that a policy names: the first is its choice, the others are for when that cannot be reached."""


class Policy(Protocol):
    """An order of the replicas that may serve a request. It neither waits nor reads a clock of its own."""

    @property
    def name(self) -> str:
        """What people call it by."""

    @property
    def always_decides(self) -> bool:
        """Whether it names a replica for every request. If not, another policy has to follow it."""

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """Returns at most MAX_CANDIDATES of the replicas, best first; () leaves the decision to the next policy.
        `ready` has at least one replica, and only those that may serve the request."""

    def sent(self, request: Request, replica: Replica) -> None:
        """The request goes to this replica, whichever policy chose it. Not called for a replica that was tried in
        vain."""
