"""Scripted daemons and a real router, all behind links that break, and a client that calls the daemons itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from genserve.client import AsyncClient, Direct
from genserve.client.direct.replicas import DirectReplicas
from genserve.client.direct.tokens import DirectTokens
from genserve.fleet.config import FleetSettings
from genserve.routing.replica import ReplicaState
from tests.fleet.routers import QUICK, RoutedFleet, linked
from tests.fleet.scripted_fleet import running
from tests.support.breakable_link import BreakableLink
from tests.support.patience import until
from tests.support.scripted_daemon import FIXED_WINDOWS, Daemon, ScriptedStream

DIRECT = Direct(
    policies="requests", report_interval_s=0.1, silence_s=60.0, keep_s=300.0, wait_ready_s=60.0, connect_timeout_s=20.0
)
QUIET = replace(DIRECT, report_interval_s=60.0, silence_s=120.0)
"""The router tells no loads while a test lasts: those of scripted engines leave out the requests that run, so what was
told between two requests would change where the second one goes."""


class DirectClient(AsyncClient):
    """A client that calls the daemons itself."""

    @property
    def replicas(self) -> DirectReplicas:
        """What it knows of the replicas."""
        assert isinstance(self._tokens, DirectTokens)
        return self._tokens.replicas


@dataclass
class DirectFleet:
    """`links`: of the daemons, for the router and the client alike. `router_link`: of the client to the router."""

    routed: RoutedFleet
    daemons: list[Daemon]
    links: list[BreakableLink]
    router_link: BreakableLink
    client: DirectClient

    async def running(self, request_id: str, besides: ScriptedStream | None = None) -> tuple[int, ScriptedStream]:
        """Where a request runs, and the engine's side of it. `besides`: not this one of it."""
        return await running(self.daemons, request_id, besides)

    @property
    def num_submitted(self) -> list[int]:
        """Requests that each engine was given."""
        return [len(daemon.engine.requests) for daemon in self.daemons]

    @property
    def known(self) -> DirectReplicas:
        """What the client knows."""
        return self.client.replicas

    def state(self, number: int) -> ReplicaState | None:
        """What the client takes a replica to be, None if it does not know it."""
        states = {each.address: each.state for each in self.known.replicas()}
        return states.get(self.links[number].address)

    async def until_known(self, *states: ReplicaState | None) -> None:
        """Waits until the client takes the replicas to be in these states."""
        await until(lambda: [self.state(number) for number in range(len(self.links))] == list(states))

    def blind_router(self) -> None:
        """The router learns nothing any more."""
        self.routed.blind()


@asynccontextmanager
async def direct_fleet(
    count: int = 3,
    direct: Direct = DIRECT,
    settings: FleetSettings = QUICK,
    **config: Any,
) -> AsyncIterator[DirectFleet]:
    """So many daemons, all ready for the router; the client has not called it yet."""
    async with (
        linked(count, settings, **config) as routed,
        BreakableLink(routed.running.address) as router_link,
        DirectClient(router_link.address, direct=direct, options=[FIXED_WINDOWS]) as client,
    ):
        yield DirectFleet(routed, routed.daemons, routed.links, router_link, client)
