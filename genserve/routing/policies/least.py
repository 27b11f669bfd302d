"""The least of many replicas, by chance among equals."""

from collections.abc import Callable, Sequence
from heapq import nsmallest
from random import Random

from genserve.routing.policies.policy import MAX_CANDIDATES
from genserve.routing.replica import Replica


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
