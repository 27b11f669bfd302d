"""`prefix-aware`: a replica that was sent the longest beginning of the prompt, unless it has too much to do."""

from collections.abc import Callable, Sequence
from math import ceil
from operator import attrgetter
from typing import Final

from genserve.routing.policies.policy import MAX_CANDIDATES
from genserve.routing.policies.prefix_index import PrefixIndex
from genserve.routing.replica import Replica, Request

OVERLOAD_THRESHOLD: Final = 1.5
"""A replica is overloaded with more than this many times the mean of outstanding sequences. torchrl's default."""

_FREE_SHARE: Final = 1 / 8
"""This share of its batch never overloads a replica: in an idle fleet, the samples of a prompt would have no room."""

_OUTSTANDING: Final[Callable[[Replica], int]] = attrgetter("outstanding")


class PrefixAware:
    """Sends a prompt where its KV cache is, with a bound on the load as in consistent hashing with bounded loads
    (Mirrokni, Thorup, Zadimoghaddam 2018). Where a new prompt begins is for the next policy to decide.

    A prompt that repeats or continues an earlier one follows it, up to the bound: samples of one prompt, and turns of a
    session. A prompt that only begins like others, with a system prompt, follows them to replicas with at most the mean
    load, so that new prompts spread evenly and a hot prefix comes to more and more replicas.
    """

    name: Final = "prefix-aware"
    always_decides: Final = False

    def __init__(self, index: PrefixIndex, overload_threshold: float = OVERLOAD_THRESHOLD) -> None:
        if not overload_threshold >= 1:
            raise ValueError(f"overload_threshold must be at least 1, is {overload_threshold}")
        self._index = index
        self._overload_threshold = overload_threshold

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """The replicas that hold the most of the prompt, the least loaded first; () if none has room."""
        match = self._index.match(request.prefix_blocks)
        if match is None:
            return ()
        holders = set(match.holders)
        holding = [replica for replica in ready if replica.instance_id in holders]
        if not holding:
            return ()
        total = sum(map(_OUTSTANDING, ready)) + request.num_sequences
        mean = total / len(ready)
        with_room = [
            replica
            for replica in holding
            if replica.outstanding + request.num_sequences <= self._bound(mean, replica, match.is_whole)
        ]
        return tuple(sorted(with_room, key=_OUTSTANDING)[:MAX_CANDIDATES])

    def sent(self, request: Request, replica: Replica) -> None:
        """The replica holds the prompt from now on."""
        self._index.add(request.prefix_blocks, replica.instance_id)

    def _bound(self, mean: float, replica: Replica, is_whole: bool) -> int:
        if not is_whole:
            return ceil(mean)
        return max(ceil(self._overload_threshold * mean), int(_FREE_SHARE * replica.max_num_seqs))
