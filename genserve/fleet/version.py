"""Versions of the weights, told apart by more than their numbers."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from genserve.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class Version:
    """What a replica serves. `push_id`: of the push that brought it, "" = its checkpoint or vLLM's own transfer.
    `content_digest`: as in PushHeader, "" = not known. `base_digest`: tells the checkpoint apart that the replica has
    started with, "" = not known."""

    number: int
    push_id: str = ""
    content_digest: str = ""
    base_digest: str = ""

    @classmethod
    def of(cls, message: types_pb2.EngineState | types_pb2.FleetState) -> Self:
        """As a replica, or the record of a fleet, tells it."""
        return cls(message.weight_version, message.push_id, message.content_digest, message.base_digest)

    @property
    def is_checkpoint(self) -> bool:
        """Whether a replica that starts has it: nobody has pushed it."""
        return self.number == 0 and not self.push_id

    def is_same(self, other: "Version") -> bool:
        """Whether both have the same number and the same bytes, as far as anybody can tell."""
        if self.number != other.number:
            return False
        if self.is_checkpoint and other.is_checkpoint and self.base_digest and other.base_digest:
            return self.base_digest == other.base_digest
        return self.push_id == other.push_id or self.content_digest == other.content_digest != ""


def newest(versions: Iterable[Version]) -> Version | None:
    """The version of a fleet that nobody has written down: the highest, and of two with this number that which more
    replicas serve."""
    counts = Counter(versions)
    return max(counts, key=lambda version: (version.number, counts[version], version.push_id), default=None)
