"""`kv-cache`: the replica with the largest free share of its KV cache."""

from collections.abc import Sequence
from operator import attrgetter
from random import Random
from typing import Final

from genserve.routing.policies.policy import least
from genserve.routing.replica import Replica, Request

_KV_PRESSURE: Final = attrgetter("kv_pressure")


class KvCache:
    """For sequences of very different lengths, where their number says little. The use that replicas report is late,
    so what was sent since is added to it: everything would go to one replica until its next report otherwise."""

    name: Final = "kv-cache"
    always_decides: Final = True

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """The replicas whose KV cache is used least."""
        return least(ready, _KV_PRESSURE, self._rng)

    def sent(self, request: Request, replica: Replica) -> None:
        """Nothing to remember: `Replica.kv_pressure` has it."""
