"""Which replicas were sent which prefixes lately: an approximation of their prefix caches, of bounded size."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

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
