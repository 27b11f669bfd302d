"""Scripted daemons behind a real router, and clients of both."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from genserve.client import AsyncClient
from genserve.control.drain import Drain, Drained
from genserve.fleet.config import FleetSettings, RouteConfig
from genserve.fleet.serve import RunningRouter, start_router
from genserve.process.signals import Stopped
from genserve.routing.replica import ReplicaState
from genserve.settings.config import ServeConfig
from tests.fleet.reports import until_reported
from tests.support.breakable_link import BreakableLink
from tests.support.patience import STEP_S, until
from tests.support.pulled_peers import CHECKPOINT, content, weights
from tests.support.scripted_daemon import Daemon, GeneratingEngine, serving
from tests.support.scripted_engine import Gate

QUICK = FleetSettings(
    heartbeat_s=0.1, report_interval_s=0.1, silence_s=60.0, settle_s=60.0, wait_ready_s=60.0, straggler_s=60.0
)
"""Replicas tell at once what has changed. What only time brings does not come while a test lasts, however slow the
machine is: a test that is about it sets the clock forward."""
MAX_STAGING_BYTES = 1 << 30
HOUR_S = 3600.0


@asynccontextmanager
async def replica(
    port: int = 0, engine: GeneratingEngine | None = None, max_staging_bytes: int = MAX_STAGING_BYTES
) -> AsyncIterator[Daemon]:
    """A scripted daemon that takes weights of tests.support.pulled_peers."""
    settings: Any = {"checkpoint": CHECKPOINT, "max_staging_bytes": max_staging_bytes, "instance_id": uuid4().hex}
    async with serving(ServeConfig(port=port), engine=engine, **settings) as daemon:
        yield daemon


@asynccontextmanager
async def adapting(max_staging_bytes: int = MAX_STAGING_BYTES) -> AsyncIterator[Daemon]:
    """A replica that takes adapters as well."""
    engine = GeneratingEngine()
    engine.max_loras = 4
    async with replica(engine=engine, max_staging_bytes=max_staging_bytes) as daemon:
        yield daemon


@dataclass
class RoutedFleet:
    """Daemons, their router, what ends that, and a client of it. `links`: one to each daemon, in their order, where the
    router knows the links instead of the daemons."""

    daemons: list[Daemon]
    running: RunningRouter
    stopped: Stopped
    client: AsyncClient
    stack: AsyncExitStack
    links: list[BreakableLink] = field(default_factory=list)

    def state(self, daemon: Daemon) -> ReplicaState:
        """What the router takes a daemon to be."""
        return self.state_of(daemon.address)

    def state_of(self, address: str) -> ReplicaState:
        """What the router takes a replica to be."""
        fleet = self.running.router.fleet
        return fleet.where(fleet.upstreams[address].member)[0]

    async def until_ready(self, count: int | None = None) -> None:
        """Waits until so many replicas get requests; by default all."""
        expected = len(self.daemons) if count is None else count
        await until(lambda: len(self.running.router.fleet.ready) == expected)

    def blind(self) -> None:
        """The router learns nothing any more."""
        of_replicas = [task for task in asyncio.all_tasks() if task.get_name().startswith("replica ")]
        assert of_replicas
        for task in of_replicas:
            task.cancel()

    def unwatched(self, daemon: Daemon) -> None:
        """The router learns nothing of this replica any more."""
        of_it = [task for task in asyncio.all_tasks() if task.get_name() == f"replica {daemon.address}"]
        assert of_it
        for task in of_it:
            task.cancel()

    async def until_reported(self) -> None:
        """Waits until each replica that answers has told its state twice: what must not happen would have begun."""
        await until_reported(self.running.router.fleet)


@asynccontextmanager
async def routed(
    num_replicas: int, settings: FleetSettings = QUICK, policies: str = "requests", **config: Any
) -> AsyncIterator[RoutedFleet]:
    """So many daemons, all ready."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(num_replicas)]
        daemons.sort(key=lambda daemon: daemon.address)  # a push goes from the first one to the last
        async with over(daemons, settings, policies, **config) as fleet:
            await fleet.until_ready()
            yield fleet


@asynccontextmanager
async def linked(
    num_replicas: int,
    settings: FleetSettings = QUICK,
    opened: Callable[[], AbstractAsyncContextManager[Daemon]] = replica,
    **config: Any,
) -> AsyncIterator[RoutedFleet]:
    """So many daemons, all ready, each of which its router reaches through a link. `opened`: opens one."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(opened()) for _ in range(num_replicas)]
        links = [await stack.enter_async_context(BreakableLink("")) for _ in daemons]
        # A push goes from the first one to the last, also by a router that reaches the daemons themselves.
        daemons.sort(key=lambda daemon: daemon.address)
        links.sort(key=lambda link: link.address)
        async with over([], settings, **config) as fleet:
            fleet.daemons, fleet.links = daemons, links
            for link, daemon in zip(links, daemons, strict=True):
                link.target = daemon.address
                fleet.running.router.add(link.address)
            await fleet.until_ready()
            yield fleet


@asynccontextmanager
async def over(
    daemons: Sequence[Daemon], settings: FleetSettings = QUICK, policies: str = "requests", **config: Any
) -> AsyncIterator[RoutedFleet]:
    """A router over daemons that run."""
    async with AsyncExitStack() as stack:
        route = RouteConfig([each.address for each in daemons], port=0, policies=policies, fleet=settings, **config)
        stopped = Stopped()
        running = await start_router(route, stack, stopped)
        client = await stack.enter_async_context(AsyncClient(running.address))
        yield RoutedFleet(list(daemons), running, stopped, client, stack)


@asynccontextmanager
async def restarted(fleet: RoutedFleet, daemons: Sequence[Daemon] | None = None) -> AsyncIterator[RoutedFleet]:
    """The router is killed, and another one starts over these replicas; all by default."""
    fleet.blind()
    async with over(fleet.daemons if daemons is None else daemons) as again:
        yield again


async def push(address: str, version: int, **options: Any) -> None:
    """The weights of this version, to a router or to a daemon alone."""
    async with AsyncClient(address) as client:
        await client.push_weights(weights(version), version=version, timeout_s=30, **options)


def hold(version: int, daemon: Daemon) -> bool:
    """Whether a daemon has the bytes of a version live."""
    return (daemon.engine.weight_version, daemon.engine.live) == (version, content(version))


@dataclass
class LateAnswers:
    """`given`: the replica has given one. `let_go`: from then on they arrive."""

    given: asyncio.Event = field(default_factory=asyncio.Event)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)


def hold_back(calls: Any, name: str) -> LateAnswers:
    """Answers to this call of a router to a replica are on their way until they are let go."""
    call, answers = getattr(calls, name), LateAnswers()

    async def late(*args: Any, **more: Any) -> Any:
        answer = await call(*args, **more)
        answers.given.set()
        await answers.let_go.wait()
        return answer

    setattr(calls, name, lambda *args, **more: asyncio.ensure_future(late(*args, **more)))
    return answers


async def until_reached(gate: Gate) -> None:
    """Waits until an engine is at a step."""
    await until(gate.reached.is_set)


def running(fleet: RoutedFleet) -> list[bool]:
    """Whether each engine runs."""
    return [daemon.engine.running for daemon in fleet.daemons]


def shutting_down(daemon: Daemon, limit_s: float = HOUR_S) -> "asyncio.Task[Drained]":
    """What SIGTERM does to a daemon."""
    parts = daemon.parts
    drain = Drain(daemon.engine, daemon.board, daemon.pauses, parts.transfers, daemon.registry)
    return asyncio.create_task(drain.run(Stopped(), limit_s))


async def ended(task: "asyncio.Task[Drained]") -> list[str]:
    """What it has cut off, when it has ended."""
    async with asyncio.timeout(STEP_S):
        return (await task).cut


def loaded(daemon: Daemon) -> tuple[str, int]:
    """Where the adapter came from that is loaded, and its version."""
    (lora,) = daemon.engine.loras.loaded()
    return lora.source, lora.version
