"""`power-of-two`: the less loaded of two replicas that chance picks."""

from collections.abc import Sequence
from random import Random
from typing import Final

from genserve.routing.replica import Replica, Request


class PowerOfTwo:
    """For many senders that see the same late reports: they do not all run to the replica that was idle a second ago
    (Mitzenmacher 2001, The Power of Two Choices in Randomized Load Balancing)."""

    name: Final = "power-of-two"
    always_decides: Final = True

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """The two replicas, the one with fewer outstanding sequences first."""
        picked = self._rng.sample(ready, min(2, len(ready)))
        return tuple(sorted(picked, key=lambda replica: replica.outstanding))

    def sent(self, request: Request, replica: Replica) -> None:
        """Nothing to remember: each choice is new."""
