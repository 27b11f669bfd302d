"""What a policy is, and the least of many replicas, by chance among equals."""

from collections.abc import Callable, Sequence
from heapq import nsmallest
from random import Random
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


def least(ready: Sequence[Replica], key: Callable[[Replica], float], rng: Random) -> tuple[Replica, ...]:
    """Returns the MAX_CANDIDATES replicas with the smallest keys, smallest first.

    Equals are in an order of chance: senders that see the same reports would otherwise all choose the same replica.
    Takes a few passes over the replicas and sorts none of them.
    """
    keys = list(map(key, ready))
    smallest = nsmallest(MAX_CANDIDATES, keys)
    last = smallest[-1]
    equal = [replica for replica, its_key in zip(ready, keys, strict=True) if its_key == last]
    if smallest[0] == last:
        return tuple(rng.sample(equal, len(smallest)))
    below = [replica for replica, its_key in zip(ready, keys, strict=True) if its_key < last]
    rng.shuffle(below)
    return (*sorted(below, key=key), *rng.sample(equal, len(smallest) - len(below)))
