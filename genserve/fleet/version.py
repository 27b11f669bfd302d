"""Versions of the weights, told apart by more than their numbers."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Version:
    """What a replica serves. `push_id`: of the push that brought it, "" = its checkpoint or vLLM's own transfer.
    `content_digest`: as in PushHeader, "" = not known."""

    number: int
    push_id: str = ""
    content_digest: str = ""

    def is_same(self, other: "Version") -> bool:
        """Whether both have the same number and the same bytes, as far as anybody can tell."""
        if self.number != other.number:
            return False
        return self.push_id == other.push_id or self.content_digest == other.content_digest != ""


def newest(versions: Iterable[Version]) -> Version | None:
    """The version that a fleet has committed, told from what its replicas serve: a version is committed on one of them
    only after all have prepared it, so it is the highest. Of two with this number that which more replicas serve."""
    counts = Counter(versions)
    return max(counts, key=lambda version: (version.number, counts[version], version.push_id), default=None)
