"""A daemon in memory: all of it is real but its engine, its process and the network."""

import asyncio
import time
from typing import Any

from genserve.control.conditions import DaemonCondition
from genserve.control.leases import LeaseTable
from genserve.control.membership import Membership
from genserve.control.pause import PauseController
from genserve.control.sleep import SleepController
from genserve.control.state import ServedWeights, StateBoard
from genserve.rpc.server import SERVICES, ServerParts, services_of, weights_of
from genserve.rpc.services import ServiceTable
from genserve.rpc.status_answers import add_starting
from genserve.settings.config import ServeConfig
from genserve.weights.apply import PushApplier
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from genserve.weights.lora.loader import LoraLoader
from genserve.weights.registry import PushRegistry
from genserve.weights.resident import ResidentStore
from genserve.weights.vllm_transfer import TransferUpdates
from genserve.wire.literals import ROUTER_ID_KEY
from tests.simulation.channel import MemoryCaller
from tests.simulation.engine import CONTENT_BYTES, SimulatedEngine
from tests.simulation.events import Events, Kept
from tests.simulation.network import Network, Server
from tests.simulation.served_call import HOST_KEY
from tests.simulation.virtual_time import Process, WallClock

CHECKPOINT = CheckpointIndex({name: CheckpointTensor("F32", (4,), CONTENT_BYTES) for name in ("a", "b")})
_CONFIG = ServeConfig(port=0, no_shared_memory=True, write_timeout_s=0.0)
_MAX_STAGING_BYTES = 1000
_WATCH = "/genserve.v1.ControlService/WatchStatus"
_ANY_ROUTER = ("/genserve.v1.ControlService/GetServerInfo",)


class Replica:
    """What is at an address: one run of a daemon after the other. Each starts with version 0, and knows nothing."""

    def __init__(self, address: str, network: Network, events: Events) -> None:
        self.address = address
        self.clock = WallClock()
        self.num_runs = 0
        self._network = network
        self._events = events
        self._router_id = self._router_host = ""
        self._watching: dict[str, int] = {}

    async def start(self) -> None:
        """Begins a run. It answers at once, and serves when its engine is there."""
        self.num_runs += 1
        self.process = Process(self.address, self.clock)
        await self.process.start(self._start())

    async def _start(self) -> None:
        drawn, network = self._network.drawn, self._network
        monotonic_s, wall_clock_s = (lambda: time.monotonic()), (lambda: time.time())
        self._router_id, self._router_host, self._watching = "", "", {}
        leases = LeaseTable(monotonic_s, wall_clock=wall_clock_s)
        board = self.board = StateBoard(
            None, lambda: leases.active, f"{self.address}#{self.num_runs}", DaemonCondition.STARTING
        )
        board.membership = Membership(board.notify, monotonic_s, wall_clock_s)
        board.tell_step("it loads", time.time())
        table = ServiceTable(board.membership)
        early = add_starting(table, SERVICES, board)
        self._server = Server(self.process, table, self._saw)
        network.listen(self.address, self._server)
        self.process.start(self._serve(leases, early, drawn.random() * 2), "serve")
        self.process.start(self._keep(), "note what is kept")

    async def _serve(self, leases: LeaseTable, early: Any, takes_s: float) -> None:
        board = self.board
        await asyncio.sleep(takes_s)
        engine = self.engine = SimulatedEngine(self._network.drawn, self)
        board.attach(engine)
        pauses = PauseController(engine, leases, board)
        resident = self.resident = ResidentStore(None, enabled=True)
        board.tell_served(lambda: ServedWeights(resident.push_id, resident.content_digest, "base"))
        applier = PushApplier(engine, pauses, board, resident)
        loras = LoraLoader(engine, board, pauses, CHECKPOINT)
        pushes = self.pushes = PushRegistry(
            CHECKPOINT, engine, applier, loras, board, resident, _MAX_STAGING_BYTES, lambda: time.monotonic()
        )
        transfers = TransferUpdates(engine, pauses, board, pushes, applier, resident)
        sleeps = SleepController(engine, pauses, board, applier)
        parts = ServerParts(
            *(_CONFIG, engine, board, pauses, sleeps, pushes, resident, transfers, loras, CHECKPOINT),
            *(_MAX_STAGING_BYTES, lambda cause, limit_s: None),
            peers=MemoryCaller(self._network),
        )
        for each in (pauses, pushes.live, transfers):
            self.process.start(each.run(), "background")
        self._server.table.become(services_of(parts, weights_of(parts)))
        early.tell_in_flight(pushes.live.in_flight)
        board.become(DaemonCondition.SERVING)

    async def crash(self) -> None:
        """It ends, and all that it knew is gone."""
        process = self.process
        process.is_alive = False
        self._network.killed(process)
        self._events.note("crash", self.address)
        await process.kill()

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process.is_alive

    @property
    def serves(self) -> int:
        """The number of its live weights; -1 while it has none."""
        ready = self.is_alive and self.board.daemon_condition is DaemonCondition.SERVING
        return self.engine.content if ready else -1

    @property
    def is_asleep(self) -> bool:
        """Whether any part of it sleeps."""
        return self.is_alive and bool(self.board.asleep.names)

    @property
    def adapters(self) -> dict[str, str]:
        """The pushes that have brought its adapters, by their names."""
        if self.serves < 0:
            return {}
        return {each.name: each.push_id for each in self.engine.loras.loaded()}

    @property
    def fleet_leases(self) -> set[str]:
        """The leases of the fleet that pause it."""
        if not self.is_alive:
            return set()
        return {each.fleet_lease_id for each in self.board.state().pauses if each.fleet_lease_id}

    def emits(self, content: int) -> int:
        """A token of these weights comes into being: its number says which."""
        return self._events.token(self.address, self.process, content)

    async def _keep(self) -> None:
        """Notes each record of the fleet that it keeps."""
        board = self.board
        kept = board.membership.record
        while True:
            changed = board.changed.next
            if board.membership.record is not kept:
                kept = board.membership.record
                self._events.kept.append(
                    Kept(self._events.now_s, self.address, self.num_runs, kept.epoch, kept.push_id, kept.content)
                )
            await changed.wait()

    def _saw(self, method: str, metadata: Any, moment: str) -> None:
        """A call of a router is let through, begins to be carried out, or lets the router in, or ends."""
        if moment == "begins":
            self._network.strikes(self.address, method)
        told = dict(metadata)
        router_id, host = told.get(ROUTER_ID_KEY, ""), told[HOST_KEY]
        if method == _WATCH and moment == "lets in":
            # One at the address of the former router is let in at once.
            is_other = self._router_id != router_id and self._router_host != host
            if is_other and self._watching.get(self._router_id):
                self._events.violation(f"{self.address} lets a router in while another one watches it")
            self._router_id, self._router_host = router_id, host
        elif method == _WATCH:
            change = {"begins": 1, "ends": -1}.get(moment, 0)
            self._watching[router_id] = self._watching.get(router_id, 0) + change
        elif moment == "is let through" and router_id not in ("", self._router_id) and method not in _ANY_ROUTER:
            self._events.violation(f"{self.address} carries out {method} of a router that does not have it")
