"""`round-robin`: one replica after the other."""

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter
from random import Random
from typing import Final

from genserve.routing.policies.policy import MAX_CANDIDATES
from genserve.routing.replica import Replica, Request

_REPLICA_ID: Final = attrgetter("replica_id")


class RoundRobin:
    """Goes around the replicas in order of their ids, from one that chance picks: many senders do not all begin at the
    same one. It remembers the id that was last, so a replica that joins or leaves changes nobody else's turn. It does
    not look at the load."""

    name: Final = "round-robin"
    always_decides: Final = True

    def __init__(self, rng: Random, last_id: str | None = None) -> None:
        """`last_id`: the replica whose turn it was last, which may be gone; None = chance picks the first."""
        self._rng = rng
        self._last_id = last_id

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """The replica whose turn it is, and those that follow it."""
        circle = sorted(ready, key=_REPLICA_ID)
        if self._last_id is None:
            turn = self._rng.randrange(len(circle))
        else:
            turn = bisect_right(circle, self._last_id, key=_REPLICA_ID)
        chosen = (*circle[turn : turn + MAX_CANDIDATES], *circle[:turn])[:MAX_CANDIDATES]
        # Now, and not when it is sent: requests that are routed at once have to get different turns.
        self._last_id = chosen[0].replica_id
        return chosen

    def sent(self, request: Request, replica: Replica) -> None:
        """The turn was taken when it was asked for."""
