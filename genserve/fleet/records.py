"""Writes down on the replicas what the fleet should be."""

from genserve.fleet.deadlines import ASK_S
from genserve.fleet.everywhere import everywhere
from genserve.fleet.fleet import Fleet
from genserve.fleet.upstream import Upstream
from genserve.v1 import control_pb2


def lacks_record(fleet: Fleet, upstream: Upstream) -> bool:
    """Whether a replica that serves the version of the fleet is to be told what the fleet should be. The others are
    told when they serve it: so a record says what its replica was brought to."""
    member, committed = upstream.member, fleet.committed
    if committed is None or member.version is None or not member.version.is_same(committed):
        return False
    if member.record is None or member.record.epoch < fleet.desired.epoch:
        return True
    # What a daemon has read from its disk says of an epoch which version that was, and no more.
    return (member.is_forgetful or not member.is_written) and member.record != fleet.record()


async def write_record(fleet: Fleet) -> None:
    """Tells every replica that lacks it. One that does not answer is told later."""
    await everywhere(
        [each for each in fleet.answering if lacks_record(fleet, each)], lambda each: write_on(fleet, each)
    )


async def write_on(fleet: Fleet, upstream: Upstream) -> None:
    """Tells a replica. Raises its error."""
    record = fleet.record()
    if record is not None:
        request = control_pb2.SetFleetStateRequest(fleet=record)
        await upstream.ask(upstream.control.SetFleetState, request, ASK_S)
        upstream.member.keeps(record)
