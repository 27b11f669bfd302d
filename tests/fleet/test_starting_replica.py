"""A replica that listens before its engine is there."""

from typing import Any

import grpc
import grpc.aio

from genserve.control.conditions import DaemonCondition
from genserve.control.state import StateBoard
from genserve.routing.replica import Request
from genserve.rpc.server import DaemonServer
from genserve.settings.config import ServeConfig
from genserve.v1 import fleet_pb2
from genserve.v1.fleet_pb2_grpc import FleetServiceStub
from tests.fleet.routers import MAX_STAGING_BYTES, routed
from tests.support.patience import until
from tests.support.pulled_peers import CHECKPOINT
from tests.support.scripted_daemon import serving


async def test_a_replica_whose_engine_starts_gets_requests_when_it_serves() -> None:
    """It is listed with what it does meanwhile, and takes part once it is ready, without a new connection."""
    settings: Any = {"checkpoint": CHECKPOINT, "max_staging_bytes": MAX_STAGING_BYTES, "instance_id": "late"}
    board = StateBoard(None, tuple, "late", DaemonCondition.STARTING)
    board.tell_step("loading weights", 0.0)
    config = ServeConfig(port=0)
    opened = await DaemonServer.open(config, board)
    try:
        async with routed(1) as fleet, grpc.aio.insecure_channel(fleet.running.address) as channel:
            stub = FleetServiceStub(channel)
            await stub.AddReplica(fleet_pb2.AddReplicaRequest(address=opened.address), timeout=30)
            seen: list[str] = []

            def told() -> bool:
                member = fleet.running.router.find(opened.address).member
                seen[:] = [fleet.running.router.fleet.where(member)[1]]
                return "starting" in seen[0]

            await until(told)
            assert seen == ["its engine is starting: loading weights"]
            replica_told = next(
                each
                for each in (await stub.ListReplicas(fleet_pb2.ListReplicasRequest(), timeout=30)).replicas
                if each.address == opened.address
            )
            assert replica_told.state == fleet_pb2.REPLICA_STATE_CONNECTING
            for _ in range(20):
                assert (await fleet.running.router.fleet.route(Request())).address != opened.address
            async with serving(config, opened=opened, board=board, **settings):
                board.become(DaemonCondition.SERVING)
                await fleet.until_ready(2)
    finally:
        await opened.stop(0)
