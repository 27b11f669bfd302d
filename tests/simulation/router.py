"""A router in memory: all of it is real but its process and the network."""

import random
import time

from genserve.fleet.config import FleetSettings, RouteConfig
from genserve.fleet.fleet import Fleet
from genserve.fleet.push.pushes import FleetPushes
from genserve.fleet.router import Router
from genserve.fleet.services.control import FleetControl
from genserve.fleet.services.generation import FleetGeneration, add_generation
from genserve.fleet.services.replicas import FleetReplicas
from genserve.fleet.services.weights import FleetWeights, add_weights
from genserve.routing.names import make_chain, parse_policies
from genserve.rpc.convert.listening import ListeningFacts
from genserve.rpc.services import ServiceTable
from genserve.rpc.streams.write_deadline import WriteDeadline
from genserve.v1.control_pb2_grpc import add_ControlServiceServicer_to_server
from genserve.v1.fleet_pb2_grpc import add_FleetServiceServicer_to_server
from tests.simulation.channel import MemoryCaller
from tests.simulation.events import Events
from tests.simulation.network import Network, Server
from tests.simulation.virtual_time import Process, WallClock

SETTINGS = FleetSettings(heartbeat_s=2.0, wait_ready_s=10.0)


class RouterHost:
    """What is at an address: one run of a router after the other."""

    def __init__(self, address: str, network: Network, events: Events) -> None:
        self.address = address
        self.clock = WallClock()
        self.num_runs = 0
        self.started_s = 0.0
        self._network = network
        self._events = events
        self._process: Process | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.is_alive

    @property
    def num_answering(self) -> int:
        """How many replicas it looks after; -1 = it does not run."""
        return len(self.fleet.answering) if self.is_alive and hasattr(self, "fleet") else -1

    async def start(self, replicas: list[str]) -> None:
        """Begins a run that knows the addresses of its replicas and nothing else."""
        self.num_runs += 1
        self._process = process = Process(self.address, self.clock)
        self.started_s = self._events.now_s
        self._events.note("router starts", self.address)
        await process.start(self._start(process, replicas))

    async def _start(self, process: Process, replicas: list[str]) -> None:
        config = RouteConfig(fleet=SETTINGS)
        chain = make_chain(
            parse_policies("requests"), random.Random(self._network.drawn.random()), lambda: time.monotonic()
        )
        fleet = self.fleet = Fleet(config.fleet, chain)
        pushes = FleetPushes(fleet)
        router = self.router = Router(fleet, pushes, MemoryCaller(self._network))
        for address in replicas:
            router.add(address)
        table = ServiceTable()
        add_generation(table.as_server, FleetGeneration(fleet, WriteDeadline(0.0)))
        add_weights(table.as_server, FleetWeights(router, pushes))
        control = FleetControl(router, ListeningFacts.of(config, 0.0), lambda cause, limit_s: None)
        add_ControlServiceServicer_to_server(control, table.as_server)
        add_FleetServiceServicer_to_server(FleetReplicas(router), table.as_server)
        fleet.router.address = self.address
        self._network.listen(self.address, Server(process, table))
        process.start(router.follow(), "follow")

    async def crash(self) -> None:
        """It ends, and its host knows nothing of it any more."""
        if self._process is not None and self._process.is_alive:
            self._process.is_alive = False
            self._network.killed(self._process)
            self._events.note("router crashes", self.address)
            await self._process.kill()

    @property
    def is_settled(self) -> bool:
        """Whether all replicas are ready, and keep the record of now; no lease is left."""
        if not self.is_alive or self.fleet.committed is None:
            return False
        fleet = self.fleet
        epochs = {member.record.epoch if member.record is not None else 0 for member in fleet.members}
        return (
            len(fleet.ready) == len(fleet.members) > 0
            and epochs == {fleet.desired.epoch}
            and not fleet.leases.active
            and not self._brings_adapters
        )

    @property
    def _brings_adapters(self) -> bool:
        """Whether a replica lacks an adapter that another one has."""
        members = self.fleet.members
        there = {push_id for each in members for push_id in each.pushed_loras.values()}
        return any(there & set(each.missing_loras.values()) for each in members)

    def why(self) -> str:
        """What its replicas do, for people."""
        if not self.is_alive:
            return "the router is not there"
        told = []
        for each in self.fleet.members:
            state, why = self.fleet.where(each)
            epoch = each.record.epoch if each.record is not None else 0
            told.append(f"{each.address} {state.value} {why} (keeps {epoch})")
        leases = [each.lease_id for each in self.fleet.leases.active]
        return f"epoch {self.fleet.desired.epoch}, leases {leases}, {self.fleet.committed}: {'; '.join(told)}"
