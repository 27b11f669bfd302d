"""The composition root of a router: the one place that names concrete classes."""

import asyncio
import logging
import random
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc.aio

from genserve.aio import cancel_all
from genserve.fleet.config import RouteConfig
from genserve.fleet.discovery import Discovery, FoundAddresses, dns_addresses
from genserve.fleet.fleet import Fleet
from genserve.fleet.push.pushes import FleetPushes
from genserve.fleet.router import Router
from genserve.fleet.services.control import FleetControl
from genserve.fleet.services.generation import FleetGeneration, add_generation
from genserve.fleet.services.replicas import FleetReplicas
from genserve.fleet.services.series import RouterSeries
from genserve.fleet.services.weights import FleetWeights, add_weights
from genserve.metrics.process import ProcessMetrics, access_of
from genserve.net import require_free
from genserve.observe.log_lines import JSON, write_log_lines
from genserve.observe.notices import say
from genserve.process.signals import Stopped, stop_on_signals
from genserve.routing.names import make_chain, parse_policies
from genserve.rpc.convert.listening import ListeningFacts
from genserve.rpc.grpc_services import add_grpc_services
from genserve.rpc.listener import bind, make_server
from genserve.rpc.services import ServiceTable
from genserve.rpc.streams.write_deadline import WriteDeadline
from genserve.security.access import NOBODY, Access
from genserve.security.access_list import AccessSource, open_access_list
from genserve.security.caller import Caller
from genserve.security.certificates import check_files, say_who_may_connect
from genserve.v1 import control_pb2, fleet_pb2, generation_pb2, weights_pb2
from genserve.v1.control_pb2_grpc import add_ControlServiceServicer_to_server
from genserve.v1.fleet_pb2_grpc import add_FleetServiceServicer_to_server

CLOSE_GRACE_S = 2.0
_NO_LIMIT_S = 1e9  # `wait_ended` has one; with None, gRPC would end the calls at once
SERVICE_NAMES = tuple(
    service.full_name
    for file in (generation_pb2, weights_pb2, control_pb2, fleet_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
)


class _Serving:
    """Health of a router: SERVING while a replica gets requests."""

    def __init__(self, router: Router) -> None:
        self._router = router

    @property
    def is_serving(self) -> bool:
        return bool(self._router.fleet.ready) and not self._router.is_draining

    @property
    def is_over(self) -> bool:
        return self._router.is_draining

    async def wait_change(self) -> None:
        await self._router.fleet.states_changed.wait()


@dataclass(slots=True)
class RunningRouter:
    """A router that listens at `address`. `metrics_url`: where its series are, "" = nowhere."""

    address: str
    router: Router
    pushes: FleetPushes
    server: grpc.aio.Server
    metrics_url: str = ""

    async def drain(self, stopped: Stopped, flag_s: float) -> None:
        """Takes no new calls, and waits for those that run, for a push that goes on without its trainer, of which
        replicas are told to commit it one by one, and for leases that end. As long as `stopped` says, or else
        `flag_s`."""
        self.router.refuse()
        ending = asyncio.create_task(self._end(), name="drain")
        try:
            if await stopped.wait_ended(ending, flag_s):
                ending.result()
            else:
                await self.server.stop(None)  # ends the calls
                await asyncio.wait({ending}, timeout=CLOSE_GRACE_S)  # for what the calls have to undo
        finally:
            await cancel_all([ending])

    async def _end(self) -> None:
        await self.server.stop(_NO_LIMIT_S)
        while self.pushes.are_live:
            await self.router.fleet.states_changed.wait()
        await self._leases_ended()

    async def _leases_ended(self) -> None:
        """Replicas that answer have no lease of a pause that was undone, or that somebody has resumed: the next router
        would take it for one that is held."""
        fleet = self.router.fleet
        await fleet.lease_turns.over()
        while any(fleet.leases.left_over(each.address) for each in fleet.answering):
            await fleet.states_changed.wait()


async def start_router(
    config: RouteConfig,
    stack: AsyncExitStack,
    stopped: Stopped,
    finding: Mapping[str, FoundAddresses] | None = None,
    environment: Access = NOBODY,
) -> RunningRouter:
    """Starts listening, and looking after the replicas; `stack` ends it. A Drain call sets `stopped`, upon which the
    caller is to drain it. `finding`: more replicas than the config names, as others find them, by the name of where
    they look. `environment`: the callers that it lists. Raises OSError for an address that cannot be used, and
    ValueError for a file or the address of a replica that cannot."""
    require_free(config.host, config.port, config.uds)
    callers = open_access_list(AccessSource(config.auth_file, environment))
    if config.certificate is not None:
        check_files(config.certificate)
        say_who_may_connect(config.certificate)
    require_free(config.host, config.metrics_port, flag="--metrics-port")
    metrics = ProcessMetrics("router") if config.metrics_port != -1 else None
    chain = make_chain(
        parse_policies(config.policies), random.Random(), time.monotonic, overload_threshold=config.overload_threshold
    )
    fleet = Fleet(config.fleet, chain)
    pushes = FleetPushes(fleet)
    router = Router(fleet, pushes, Caller(config.peers))
    stack.push_async_callback(router.close)
    looking = {**{name: dns_addresses(name) for name in config.dns}, **({} if finding is None else finding)}
    discoveries = [Discovery(router, name, found) for name, found in looking.items()]
    for address in config.replicas:
        router.add(address)
    table = ServiceTable()
    add_generation(table.as_server, FleetGeneration(fleet, WriteDeadline(config.write_timeout_s)))
    add_weights(table.as_server, FleetWeights(router, pushes))
    listening = ListeningFacts.of(config, config.write_timeout_s)
    add_ControlServiceServicer_to_server(FleetControl(router, listening, stopped.stop), table.as_server)
    add_FleetServiceServicer_to_server(FleetReplicas(router), table.as_server)
    add_grpc_services(table.as_server, SERVICE_NAMES, _Serving(router), with_channelz=config.channelz)
    server = make_server(config, table, callers, () if metrics is None else (metrics.calls,))
    address = bind(server, config.host, config.port, config.uds, config.certificate)
    fleet.router.address = f"{address} on {socket.gethostname()}"  # which may be one of the host alone
    await server.start()
    stack.push_async_callback(server.stop, CLOSE_GRACE_S)
    background = [asyncio.create_task(router.follow(), name="follow")]
    background += [asyncio.create_task(each.run(), name="discovery") for each in discoveries]
    metrics_url = ""
    if metrics is not None:
        read = RouterSeries(router, pushes).read
        metrics_url = await metrics.serve(config.host, config.metrics_port, read, stack, access_of(config, callers))
        say(f"metrics: {metrics_url}")
        background.append(asyncio.create_task(metrics.run(), name="measuring the event loop"))
    stack.push_async_callback(cancel_all, background)
    return RunningRouter(address, router, pushes, server, metrics_url)


async def serve(
    config: RouteConfig, finding: Mapping[str, FoundAddresses] | None = None, environment: Access = NOBODY
) -> int:
    """Serves until a signal. `finding` and `environment`: as for `start_router`. Returns the exit status."""
    if config.log_format == JSON:
        write_log_lines(JSON, logging.INFO)
    else:
        logging.basicConfig(level=logging.INFO, format="genserve: %(message)s", stream=sys.stderr)
    stopped = Stopped()
    async with AsyncExitStack() as stack:
        running = await start_router(config, stack, stopped, finding, environment)
        stack.enter_context(stop_on_signals(stopped.signal))
        print(f"genserve: routing to {_named(config, finding)} on {running.address}", flush=True)
        await stopped.wait()
        limit_s = stopped.limit_s(config.drain_timeout_s)
        say(f"{stopped.cause}: draining, {limit_s:g} s at most; a second signal exits at once")
        await running.drain(stopped, config.drain_timeout_s)
    return 0


def _named(config: RouteConfig, finding: Mapping[str, FoundAddresses] | None) -> str:
    count = len(config.replicas)
    names = [*config.dns, *({} if finding is None else finding)]
    parts = [f"{count} replica{'s' if count != 1 else ''}"] if count or not names else []
    return " and ".join([*parts, *names])
