"""A version that a replica fetches from another one comes with the record of its fleet, as that of a commit does."""

import grpc.aio

from genserve.v1 import types_pb2, weights_pb2
from genserve.v1.weights_pb2_grpc import WeightServiceStub
from tests.fleet.routers import hold, over, push, replica, routed, until_reached
from tests.support.patience import until
from tests.support.scripted_engine import Gate


async def test_a_version_that_was_fetched_outlives_its_router_and_its_source() -> None:
    """The router dies while the weights are exchanged. The next one finds who has fetched the version, and one with an
    older record."""
    async with routed(2) as fleet, replica() as late:
        source, behind = fleet.daemons
        await push(fleet.running.address, 1)
        fleet.running.router.find(behind.address).member.is_draining = True
        fleet.running.router.fleet.refresh()
        await push(fleet.running.address, 2)
        gate = late.engine.gates["commit_weights"] = Gate()
        fleet.running.router.add(late.address)
        await until_reached(gate)
        fleet.blind()
        await fleet.stack.aclose()
        gate.open.set()
        await until(lambda: hold(2, late))
        assert late.board.membership.record == source.board.membership.record
        async with over([late, behind]) as again:
            await again.until_ready()
            assert again.running.router.fleet.committed_version == 2
            assert hold(2, late) and hold(2, behind)


async def test_record_fetched_with_a_version_counts_as_written_by_this_router() -> None:
    """It is not told again, and a later one that another router has left there is believed."""
    async with routed(1) as fleet, replica() as late:
        await push(fleet.running.address, 1)
        fleet.running.router.add(late.address)
        await fleet.until_ready(2)
        member = fleet.running.router.find(late.address).member
        await until(lambda: member.is_written)  # a report of the version may come before the answer that brought it
        assert member.record == fleet.running.router.fleet.record()


async def test_what_a_client_says_of_the_fleet_is_not_written_down() -> None:
    """A router knows it better."""
    async with routed(2) as fleet, replica() as other, grpc.aio.insecure_channel(fleet.running.address) as channel:
        await push(fleet.running.address, 1)
        await push(other.address, 3)
        request = weights_pb2.LoadWeightsRequest(
            push_id="p",
            peers=weights_pb2.WeightPeers(addresses=[other.address]),
            fleet=types_pb2.FleetState(epoch=fleet.running.router.fleet.desired.epoch + (1 << 32)),
        )
        for _ in range(2):  # what is served already has its answer
            await WeightServiceStub(channel).LoadWeights(request, timeout=30)
            assert all(hold(3, daemon) for daemon in fleet.daemons)
            assert all(daemon.board.membership.record.epoch < request.fleet.epoch for daemon in fleet.daemons)
