"""Asks another holder of the version of the fleet, before one of them goes: the router learns late what is lost."""

import random

from genserve.errors import NoReplicaError
from genserve.fleet.deadlines import ASK_S
from genserve.fleet.fleet import Fleet
from genserve.fleet.hand_over import holders, is_sound
from genserve.fleet.member import Member
from genserve.fleet.version import Version
from genserve.v1 import control_pb2, types_pb2


async def ask_other_holder(fleet: Fleet, leaving: Member) -> None:
    """Returns when one has answered that it has the version and stays, or at once where none is known. Raises its
    error, and NoReplicaError if it says something else."""
    committed, keeping = fleet.committed, holders(fleet, leaving)
    if committed is None or not keeping:
        return
    other = fleet.upstreams[random.choice(keeping).address]
    state = (await other.ask(other.control.GetStatus, control_pb2.GetStatusRequest(), ASK_S)).state
    if state.phase == types_pb2.PHASE_DRAINING:
        raise NoReplicaError(f"{other.address}, which has version {committed.number}, shuts down as well")
    if not is_sound(state) or not Version.of(state).is_same(committed):
        raise NoReplicaError(f"{other.address} does not have version {committed.number} any more")
