"""The chains that are compared: those that `parse_policies` knows, and two designs that are not in genserve."""

import hashlib
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from random import Random

from genserve.routing.chain import Chain
from genserve.routing.names import DEFAULT_POLICIES, DIRECT_POLICIES, POLICY_NAMES, make_chain, parse_policies
from genserve.routing.policies import LeastRequests
from genserve.routing.replica import Replica, Request
from tests.unit.routing.fleet_model import MAX_NUM_SEQS


class Torchrl:
    """torchrl's balancer with its default strategies, prefix-aware and requests: the hash of the first tokens modulo
    the number of replicas, unless that one has more than 1.5 times the mean of requests."""

    name = "torchrl's"
    always_decides = True

    def __init__(self, rng: Random) -> None:
        self._least = LeastRequests(rng)

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """The first block stands for the first eight tokens: in each load, they differ for the same prompts."""
        chosen = ready[int.from_bytes(request.prefix_blocks[0]) % len(ready)]
        mean = sum(each.outstanding for each in ready) / len(ready)
        return self._least.order(request, ready) if chosen.outstanding > 1.5 * mean else (chosen,)

    def sent(self, request: Request, replica: Replica) -> None:
        """Remembers nothing."""


class HashRing:
    """Consistent hashing of a prompt's first blocks with bounded loads: the first replica on the ring that has room, by
    the bound of PrefixAware. Remembers nothing, so senders agree without hearing of each other."""

    name = "hash ring"
    always_decides = True

    def __init__(self, num_blocks: int | None, points: int = 100) -> None:
        self._num_blocks = num_blocks
        self._points = points
        self._ring: list[tuple[int, str]] = []

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """The fleets of the model never change, so the ring is built once."""
        if not self._ring:
            self._ring = sorted(
                (_position(f"{each.replica_id} {point}".encode()), each.replica_id)
                for each in ready
                for point in range(self._points)
            )
        by_id = {each.replica_id: each for each in ready}
        bound = max(ceil(1.5 * (sum(each.outstanding for each in ready) + 1) / len(ready)), MAX_NUM_SEQS // 8)
        start = bisect(self._ring, (int.from_bytes(request.prefix_blocks[: self._num_blocks][-1]), ""))
        walk = (by_id[replica_id] for _, replica_id in (*self._ring[start:], *self._ring[:start]))
        return (next(each for each in walk if each.outstanding + 1 <= bound),)

    def sent(self, request: Request, replica: Replica) -> None:
        """Remembers nothing."""


def _position(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


def _named(text: str) -> Callable[[int], Chain]:
    # The time of the model does not pass for the sessions: none of the loads is as long as their time to live.
    return lambda sender: make_chain(parse_policies(text), Random(sender), lambda: 0.0)


COMPARED: Mapping[str, Callable[[int], Chain]] = {
    **{name: _named(name) for name in reversed(POLICY_NAMES)},
    DEFAULT_POLICIES: _named(DEFAULT_POLICIES),
    DIRECT_POLICIES: _named(DIRECT_POLICIES),
    "torchrl's default": lambda sender: Chain([Torchrl(Random(sender))]),
    "hash ring, 16 blocks": lambda sender: Chain([HashRing(16)]),
    "hash ring, whole prompt": lambda sender: Chain([HashRing(None)]),
}
"""By name, the chain of the sender with a number."""
