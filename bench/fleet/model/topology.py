"""Who fetches from whom."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from genserve.fleet.push.spread import sources

TRAINER: Final = -1


@dataclass(frozen=True, slots=True)
class Topology:
    """`fanout` 0 = the trainer sends a copy to each replica; None = the first replica sends one to each other."""

    name: str
    fanout: int | None

    def sources(self, num_replicas: int) -> tuple[tuple[int, ...], ...]:
        """Of each replica, in order of preference: the router's own plan."""
        if self.fanout == 0:
            return ((TRAINER,),) * num_replicas
        return _planned(num_replicas, self.fanout or max(1, num_replicas - 1))


NAIVE: Final = Topology("a copy each", 0)
STAR: Final = Topology("star", None)
CHAIN: Final = Topology("chain", 1)
TREES: Final = tuple(Topology(f"tree of {fanout}", fanout) for fanout in (2, 4, 8))
TOPOLOGIES: Final = (NAIVE, STAR, CHAIN, *TREES)


@lru_cache
def _planned(num_replicas: int, fanout: int) -> tuple[tuple[int, ...], ...]:
    found = sources([str(index) for index in range(num_replicas)], fanout)
    return ((TRAINER,), *(tuple(map(int, found[str(index)])) for index in range(1, num_replicas)))
