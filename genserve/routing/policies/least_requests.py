"""`requests`: the replica with the fewest sequences to serve."""

from collections.abc import Sequence
from operator import attrgetter
from random import Random
from typing import Final

from genserve.routing.policies.policy import least
from genserve.routing.replica import Replica, Request

_OUTSTANDING: Final = attrgetter("outstanding")


class LeastRequests:
    """Spreads the sequences evenly. It takes a slow replica into account, because its sequences end later."""

    name: Final = "requests"
    always_decides: Final = True

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """The replicas with the fewest outstanding sequences."""
        return least(ready, _OUTSTANDING, self._rng)

    def sent(self, request: Request, replica: Replica) -> None:
        """Nothing to remember: `Replica.inflight` has it."""
