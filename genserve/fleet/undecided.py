"""A commit of which no outcome is known yet."""

from dataclasses import dataclass

from genserve.fleet.member import Member


@dataclass(frozen=True, slots=True)
class Undecided:
    """A push that replicas were asked to commit. The first replica that decides makes it the version of the fleet, also
    if every answer to the commit is lost.

    `epoch`: that of the record sent with the commit. `is_own`: this router began it, and not the previous one.
    `deciding`: the addresses of the replicas that were up to date then. Those of the previous router are not known:
    after it, a replica decides if it keeps the record of the push, or a later one that names it.
    """

    push_id: str
    epoch: int
    is_own: bool = False
    deciding: frozenset[str] = frozenset()

    def is_decided_by(self, member: Member) -> bool:
        """Whether the fleet serves the push because this replica does."""
        if member.version is None or member.version.push_id != self.push_id:
            return False
        if self.is_own:
            return member.address in self.deciding
        record = member.record
        if record is None or record.epoch < self.epoch:  # as that of a replica which has missed what came after it
            return False
        return self.push_id in (record.push_id, record.undecided_push_id)
