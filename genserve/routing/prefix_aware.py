"""`prefix-aware`: a replica that was sent the longest beginning of the prompt, unless it has too much to do; and the
index of which replicas were sent which prefixes lately, an approximation of their prefix caches, of bounded size."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from operator import attrgetter
from typing import Final

from genserve.routing.policies import MAX_CANDIDATES
from genserve.routing.replica import Replica, Request

MAX_BLOCKS: Final = 131_072
MAX_HOLDERS: Final = 4


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known beginning of a prompt.

    `holders`: instance ids of the replicas that were sent it, latest first. `is_whole`: it is the whole prompt, or all
    of an earlier one, which the prompt continues. If not, an earlier prompt went on from there in another way.
    """

    holders: tuple[str, ...]
    is_whole: bool


class PrefixIndex:
    """The prefixes that were sent last, at most `max_blocks`, each with the last `max_holders` replicas it went to."""

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_holders: int = MAX_HOLDERS) -> None:
        if max_blocks < 1 or max_holders < 1:
            raise ValueError(f"max_blocks and max_holders must be at least 1, are {max_blocks} and {max_holders}")
        self._max_blocks = max_blocks
        self._max_holders = max_holders
        # By the hash of their last block, the prefix that was sent longest ago first.
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        # The prefixes that a prompt went on from.
        self._continued: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, blocks: Sequence[bytes], instance_id: str) -> None:
        """Records that a prompt with these blocks was sent to a replica."""
        known = self._holders
        # The longest prefix first: it is forgotten before those that it contains.
        for block in reversed(blocks):
            holders = known.get(block, ())
            if not holders or holders[0] != instance_id:
                others = [each for each in holders if each != instance_id]
                known[block] = (instance_id, *others[: self._max_holders - 1])
            known.move_to_end(block)
        self._continued.update(blocks[:-1])
        while len(known) > self._max_blocks:
            block, _ = known.popitem(last=False)
            self._continued.discard(block)

    def match(self, blocks: Sequence[bytes]) -> Match | None:
        """Returns the longest beginning of a prompt that is known, or None."""
        known = self._holders
        for depth in range(len(blocks), 0, -1):
            block = blocks[depth - 1]
            if block in known:
                return Match(known[block], depth == len(blocks) or block not in self._continued)
        return None


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
