"""What befalls a fleet: crashes, cuts, and connections that break, also in the midst of a call."""

import asyncio
import contextvars
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from tests.simulation.events import Events
from tests.simulation.network import Network, Weather
from tests.simulation.replica import Replica
from tests.simulation.router import SETTINGS, RouterHost
from tests.simulation.routers import Routers

_STRUCK = ("CommitPush", "Pause", "Resume", "SetFleetState", "LoadWeights", "PushWeights", "RenewPause")

Fault = Callable[[], Coroutine[Any, Any, None]]


class Faults:
    """Of the replicas, the routers, and the network between them. `drawn`: says which, and when. `more`: what
    else may happen."""

    def __init__(
        self,
        drawn: random.Random,
        network: Network,
        events: Events,
        replicas: Sequence[Replica],
        routers: Routers,
        more: Sequence[Fault],
    ) -> None:
        self._drawn = drawn
        self._network = network
        self._events = events
        self._replicas = replicas
        self._routers = routers
        self._more = more
        self._strikes = 0.0
        self._struck: list[asyncio.Task[None]] = []
        network.strikes = self._strike

    @property
    def _addresses(self) -> list[str]:
        return [each.address for each in self._replicas]

    async def happen(self, for_s: float) -> None:
        """Until they are over. What they have broken stays so."""
        until_s = self._events.now_s + for_s
        self._network.weather = Weather(lost=self._drawn.choice((0.0, 0.01, 0.05, 0.1)))
        kinds: list[Fault] = [self._crash_replica, self._crash_router, self._shake, self._cut, self._cut_peers]
        kinds.append(self._cut_most)
        if self._routers.are_two:
            kinds.append(self._cut_router)
        kinds += self._more
        weights = [self._drawn.random() for _ in kinds]
        self._strikes = self._drawn.choice((0.0, 0.02, 0.1))
        pace_s = self._drawn.choice((1.0, 3.0, 8.0))
        going_on: list[asyncio.Task[None]] = []
        while (left_s := until_s - self._events.now_s) > 0:
            await asyncio.sleep(min(left_s, self._drawn.expovariate(1 / pace_s)))
            (kind,) = self._drawn.choices(kinds, weights)
            going_on.append(asyncio.create_task(kind()))
        self._network.weather = Weather()
        self._strikes = 0.0
        going_on += self._struck
        for each in going_on:
            each.cancel()
        await asyncio.wait(going_on)
        for each in going_on:
            if not each.cancelled() and (error := each.exception()) is not None:
                raise error

    async def end(self) -> None:
        """Everything is there again."""
        for link in self._network.links.values():
            link.heal()
        for each in self._replicas:
            if not each.is_alive:
                await each.start()
        for router in self._routers.running:
            if not router.is_alive:
                await router.start(self._addresses)
        self._events.note("faults end")

    def _strike(self, address: str, method: str) -> None:
        """A call begins to be carried out, which may be the moment of a fault."""
        name = method.rpartition("/")[2]
        strikes = self._strikes * (5 if name == "LoadWeights" else 1)  # it is rare
        if name not in _STRUCK or self._drawn.random() >= strikes:
            return
        self._events.note("strikes", name, address)
        (replica,) = (each for each in self._replicas if each.address == address)
        router = self._routers.in_charge
        faults: list[Fault] = [
            partial(self._crash_router, router),
            partial(self._shake, address, router),
            partial(self._cut_link, router.address, address),
            partial(self._crash_replica, replica),
        ]
        if name == "LoadWeights" and router.is_alive:  # the sources, and others that are brought to the version
            ready = [each.address for each in router.fleet.ready if each.address != address]
            faults += [partial(self._crash_router, router, ready)] * len(faults)
        fault, after_s = self._drawn.choice(faults), self._drawn.random() * 0.15

        async def later() -> None:
            await asyncio.sleep(after_s)
            await fault()

        self._struck.append(asyncio.create_task(later(), context=contextvars.Context()))

    async def _crash_replica(self, replica: Replica | None = None) -> None:
        replica = replica or self._drawn.choice(self._replicas)
        if replica.is_alive:
            await replica.crash()
            await asyncio.sleep(self._drawn.expovariate(1 / 3.0))
            await replica.start()

    async def _crash_router(self, router: RouterHost | None = None, hides: Sequence[str] = ()) -> None:
        """`hides`: the replicas that the next one does not reach until it has told what the fleet is."""
        router = router or self._routers.any(self._drawn)
        if router.is_alive:
            await router.crash()
            await asyncio.sleep(self._drawn.expovariate(1 / 1.5))
            if not self._routers.are_two and self._drawn.random() < 0.2:  # on another host
                self._routers.move()
                router = self._routers.in_charge
            for_s = SETTINGS.settle_s + self._drawn.random() * 10
            cuts = [asyncio.create_task(self._cut_link(router.address, each, for_s)) for each in hides]
            await router.start(self._addresses)
            if cuts:
                await asyncio.wait(cuts)

    async def _shake(self, address: str = "", router: RouterHost | None = None) -> None:
        address = address or self._drawn.choice(self._replicas).address
        router = router or self._routers.any(self._drawn)
        self._events.note("shake", address)
        self._network.link(router.address, address).shake()

    async def _cut(self) -> None:
        router = self._routers.any(self._drawn)
        await self._cut_link(router.address, self._drawn.choice(self._replicas).address)

    async def _cut_router(self) -> None:
        """One of two is cut off from the replicas for so long that these are free for the other one, or not quite."""
        router = self._routers.any(self._drawn)
        whom = self._drawn.sample(self._addresses, self._drawn.randrange(1, len(self._addresses) + 1))
        for_s = self._drawn.choice((10.0, 33.0, 50.0)) * (0.5 + self._drawn.random())
        await asyncio.gather(*(self._cut_link(router.address, each, for_s) for each in whom))

    async def _cut_most(self) -> None:
        """All but one are behind when they are back, and fetch at once what was pushed meanwhile."""
        router, for_s = self._routers.in_charge.address, 5.0 + self._drawn.random() * 10
        cut = self._drawn.sample(self._replicas, len(self._replicas) - 1)
        await asyncio.gather(*(self._cut_link(router, each.address, for_s) for each in cut))

    async def _cut_peers(self) -> None:
        one, other = self._drawn.sample(self._replicas, 2)
        await self._cut_link(one.address, other.address)

    async def _cut_link(self, one: str, other: str, for_s: float | None = None) -> None:
        link = self._network.link(one, other)
        if not link.is_cut:
            self._events.note("cut", one, other)
            link.cut()
            if for_s is None:
                for_s = self._drawn.choice((1.0, 8.0, 15.0, 35.0)) * self._drawn.random()
            await asyncio.sleep(for_s)
            self._events.note("heal", one, other)
            link.heal()
