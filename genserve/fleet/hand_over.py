"""Whether a replica may leave without the fleet losing a version or an adapter."""

import random
from collections.abc import Iterator

from genserve.errors import NoReplicaError
from genserve.fleet.desired import Version
from genserve.fleet.fleet import Fleet
from genserve.fleet.member import Member
from genserve.fleet.upstream import ASK_S
from genserve.routing.replica import ReplicaState
from genserve.v1 import control_pb2, types_pb2


def only_there(fleet: Fleet, member: Member) -> str:
    """The pushed version or adapter that no other staying replica has, for people; "" = none. One that is just being
    asked what it has may have it."""
    return next((what for what, may_have in _lacking_elsewhere(fleet, member) if may_have), "")


def others_lack_something(fleet: Fleet, member: Member) -> bool:
    """Whether the other staying replicas lack the pushed version or a pushed adapter. Unlike `only_there` this does not
    look at what the replica has: it may not answer."""
    return next(_lacking_elsewhere(fleet, member), None) is not None


def _lacking_elsewhere(fleet: Fleet, member: Member) -> Iterator[tuple[str, bool]]:
    """The pushed version and adapters that no other staying replica has, and whether this one may have each."""
    committed = fleet.committed
    if committed is None:
        return
    if not committed.is_checkpoint and not others_with_version(fleet, member):
        yield f"version {committed.number}", _has_version(fleet, member) or member.version_is_unread
    staying = _staying(fleet, member)
    for name, push_id in fleet.desired.pushed_loras.items():
        if not any(each.pushed_loras.get(name) == push_id for each in staying):
            yield f"adapter {name!r}", member.pushed_loras.get(name) == push_id or member.loras_are_unread


def others_with_version(fleet: Fleet, leaving: Member) -> list[Member]:
    """The other replicas that stay and serve the fleet's version from a sound engine."""
    staying = _staying(fleet, leaving)
    return [each for each in staying if _has_version(fleet, each) and each.engine is not None and is_sound(each.engine)]


def is_sound(engine: types_pb2.EngineState) -> bool:
    """Whether other replicas can fetch its version: the engine lives, and its weights are consistent."""
    return engine.phase not in (types_pb2.PHASE_DEAD, types_pb2.PHASE_TAINTED)


def may_end(fleet: Fleet, member: Member) -> bool:
    """Whether a daemon that waits in its shutdown until its version is handed over may end: other replicas have the
    version, or all of them are shutting down too and none can fetch it."""
    shuts_down = member.engine is not None and member.engine.phase == types_pb2.PHASE_DRAINING
    if not shuts_down or member.is_let_go or fleet.committed is None or member.version is None:
        return False
    return not only_there(fleet, member) or (len(fleet.members) > 1 and not _staying(fleet, member))


async def check_other_has_version(fleet: Fleet, leaving: Member) -> None:
    """Confirms with another replica, before one of them leaves, that it has the fleet's version and stays, because the
    router learns late of a loss. Returns at once if no such replica is known. Raises the replica's error, and
    NoReplicaError if it has another version or is shutting down."""
    committed, keeping = fleet.committed, others_with_version(fleet, leaving)
    if committed is None or not keeping:
        return
    other = fleet.upstreams[random.choice(keeping).address]
    state = (await other.ask(other.control.GetStatus, control_pb2.GetStatusRequest(), ASK_S)).state
    if state.phase == types_pb2.PHASE_DRAINING:
        raise NoReplicaError(f"{other.address}, which has version {committed.number}, is shutting down too")
    if not is_sound(state) or not Version.of(state).is_same(committed):
        raise NoReplicaError(f"{other.address} no longer has version {committed.number}")


def _has_version(fleet: Fleet, member: Member) -> bool:
    return member.version is not None and fleet.committed is not None and member.version.is_same(fleet.committed)


def _staying(fleet: Fleet, leaving: Member) -> list[Member]:
    return [each for each in fleet.members if each is not leaving and fleet.where(each)[0] is not ReplicaState.DRAINING]
