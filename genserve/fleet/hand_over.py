"""Whether a replica may go without the version of the fleet going with it. Pure."""

from genserve.fleet.fleet import Fleet
from genserve.fleet.member import Member
from genserve.routing.replica import ReplicaState
from genserve.v1 import types_pb2


def is_only_holder(fleet: Fleet, member: Member) -> bool:
    """Whether nobody else stays that has what somebody has pushed to the fleet."""
    committed = fleet.committed
    if committed is None or committed.is_checkpoint or not _has_version(fleet, member):
        return False
    return not any(_has_version(fleet, each) for each in _staying(fleet, member))


def may_end(fleet: Fleet, member: Member) -> bool:
    """Whether a daemon that shuts down, and waits until its version is handed over, is to be told that it need not wait
    any more: others have it, or all of them shut down as well, so that nobody is there to take it."""
    if not shuts_down(member) or member.may_end or fleet.committed is None or member.version is None:
        return False
    return not is_only_holder(fleet, member) or (len(fleet.members) > 1 and not _staying(fleet, member))


def shuts_down(member: Member) -> bool:
    """Whether the daemon itself drains."""
    return member.engine is not None and member.engine.phase == types_pb2.PHASE_DRAINING


def _has_version(fleet: Fleet, member: Member) -> bool:
    return member.version is not None and fleet.committed is not None and member.version.is_same(fleet.committed)


def _staying(fleet: Fleet, leaving: Member) -> list[Member]:
    return [each for each in fleet.members if each is not leaving and fleet.where(each)[0] is not ReplicaState.DRAINING]
