"""One history of a fleet, as a seed tells it: its clients, the faults that befall it, and its end.

After a while faults end, and everything that has died starts again. Then the fleet has to come to rest.
"""

import asyncio
import contextvars
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.simulation.clients import Client, Operator, Rollouts, Sleeper, Trainer
from tests.simulation.events import ASLEEP, Events, Push
from tests.simulation.invariants import violations
from tests.simulation.network import Network, Weather
from tests.simulation.replica import Replica
from tests.simulation.router import SETTINGS, RouterHost
from tests.simulation.virtual_time import Process, virtual_time

_UNDONE_S = 20.0
_STRUCK = ("CommitPush", "Pause", "Resume", "SetFleetState", "LoadWeights", "PushWeights", "RenewPause")
FAULTS_S = 30.0
REST_S = 150.0
"""Within which a fleet without faults comes to rest: the longest waits are keep-alive (30 s) and pauses before a sync
is tried again (30 s)."""


@dataclass
class Outcome:
    """What came of a seed. `violations`: what must not be."""

    seed: int
    violations: list[str]
    events: Events = field(repr=False)

    def __str__(self) -> str:
        notes = "\n".join(" ".join(map(str, note)) for note in self.events.notes)
        return f"seed {self.seed}:\n{notes}\n" + "\n".join(self.violations)


def simulate(seed: int) -> Outcome:
    """Plays the history of a seed. The same seed gives the same history."""
    with virtual_time(seed) as loop, _ErrorLines() as lines:
        try:
            return loop.run_until_complete(_Story(seed, loop, lines.raised).play())
        finally:
            if left := asyncio.all_tasks(loop):
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left, timeout=60.0))
            loop.run_until_complete(loop.shutdown_asyncgens())
            for each in loop.results:
                each.close()


class _ErrorLines(logging.Handler):
    """What genserve logs as errors: faults of ours that nobody foresaw."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.raised: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.raised.append(f"logged: {record.getMessage()}: {error!r}")

    def __enter__(self) -> "_ErrorLines":
        self._log = logging.getLogger("genserve")
        self._before = self._log.level, self._log.propagate
        self._log.setLevel(logging.ERROR)
        self._log.propagate = False
        self._log.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._log.removeHandler(self)
        self._log.setLevel(self._before[0])
        self._log.propagate = self._before[1]


class _Story:
    def __init__(self, seed: int, loop: asyncio.AbstractEventLoop, errors: list[str]) -> None:
        self.seed = seed
        self.errors = errors
        self.drawn = drawn = random.Random(seed)
        self.events = Events(loop)
        self.network = Network(drawn)
        self.replicas = [
            Replica(f"10.0.0.{n}:1", self.network, self.events) for n in range(1, drawn.randrange(2, 5) + 1)
        ]
        self.routers = [RouterHost(f"10.0.1.{n}:1", self.network, self.events) for n in (1, 2)]
        self.router = self.routers[0]
        self.clients: list[Client] = []
        self._served: dict[tuple[str, int], int] = {}
        self._strikes = 0.0
        self._struck: list[asyncio.Task[None]] = []
        self.network.strikes = self._strike

    def _client(self, kind: type[Any], host: str) -> Any:
        client = kind(self.network, self.events, lambda: self.router.address)
        self.clients.append(client)
        client.process = Process(host)
        return client

    async def play(self) -> Outcome:
        """From the start to the end."""
        addresses = [each.address for each in self.replicas]
        for each in self.replicas:
            await each.start()
        await self.router.start(addresses)
        self.trainer = self._client(Trainer, "trainer")
        self.trainer.replicas = addresses
        self._client(Operator, "operator")
        self._client(Rollouts, "rollouts")
        if self.drawn.random() < 0.3:
            self._client(Sleeper, "sleeper")
        running = [each.process.start(each.run(), "client") for each in self.clients]
        watching = asyncio.create_task(self._look())
        if self.drawn.random() < 0.5:  # what befalls the fleet when nobody changes it any more is told by what it is
            loop, quiet_s = asyncio.get_running_loop(), self.drawn.random() * FAULTS_S
            for task in running:
                loop.call_later(quiet_s, task.cancel)
        await self._faults()
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await self._end_faults()
        await self._rest("after the faults")
        self._check_kept()
        if not await self._last_push():
            self.events.violation(f"the last push was not applied: {self.router.why()}")
        await self._rest("after the last push")
        watching.cancel()
        for each in running:
            if each.done() and not each.cancelled() and (error := each.exception()) is not None:
                raise error
        found = [*self.network.faults, *self.errors, *violations(self.events)]
        for replica in self.replicas:
            if hasattr(replica, "engine"):
                found += replica.engine.misuses
        return Outcome(self.seed, found, self.events)

    # --- faults

    async def _faults(self) -> None:
        until_s = self.events.now_s + FAULTS_S
        self.network.weather = Weather(lost=self.drawn.choice((0.0, 0.01, 0.05, 0.1)))
        kinds: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self._crash_replica, self._crash_router, self._shake, self._cut, self._cut_peers, self._cut_most
        ]  # fmt: skip
        weights = [self.drawn.random() for _ in kinds]
        self._strikes = self.drawn.choice((0.0, 0.02, 0.1))
        pace_s = self.drawn.choice((1.0, 3.0, 8.0))
        going_on: list[asyncio.Task[None]] = []
        while (left_s := until_s - self.events.now_s) > 0:
            await asyncio.sleep(min(left_s, self.drawn.expovariate(1 / pace_s)))
            (kind,) = self.drawn.choices(kinds, weights)
            going_on.append(asyncio.create_task(kind()))
        self.network.weather = Weather()
        self._strikes = 0.0
        going_on += self._struck
        for each in going_on:
            each.cancel()
        await asyncio.wait(going_on)
        for each in going_on:
            if not each.cancelled() and (error := each.exception()) is not None:
                raise error

    def _strike(self, address: str, method: str) -> None:
        """A call begins to be carried out, which may be the moment of a fault."""
        name = method.rpartition("/")[2]
        strikes = self._strikes * (5 if name == "LoadWeights" else 1)  # it is rare
        if name not in _STRUCK or self.drawn.random() >= strikes:
            return
        self.events.note("strikes", name, address)
        (replica,) = (each for each in self.replicas if each.address == address)
        faults: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self._crash_router,
            partial(self._shake, address),
            partial(self._cut_link, self.router.address, address),
            partial(self._crash_replica, replica),
        ]
        if name == "LoadWeights" and self.router.is_alive:  # the sources, and others that are brought to the version
            ready = [each.address for each in self.router.fleet.ready if each.address != address]
            faults += [partial(self._crash_router, ready)] * len(faults)
        fault, after_s = self.drawn.choice(faults), self.drawn.random() * 0.15

        async def later() -> None:
            await asyncio.sleep(after_s)
            await fault()

        self._struck.append(asyncio.create_task(later(), context=contextvars.Context()))

    async def _crash_replica(self, replica: Replica | None = None) -> None:
        replica = replica or self.drawn.choice(self.replicas)
        if replica.is_alive:
            await replica.crash()
            await asyncio.sleep(self.drawn.expovariate(1 / 3.0))
            await replica.start()

    async def _crash_router(self, hides: Sequence[str] = ()) -> None:
        """`hides`: the replicas that the next one does not reach until it has told what the fleet is."""
        if self.router.is_alive:
            await self.router.crash()
            await asyncio.sleep(self.drawn.expovariate(1 / 1.5))
            if self.drawn.random() < 0.2:  # on another host
                self.router = self.routers[self.router is self.routers[0]]
            address, for_s = self.router.address, SETTINGS.settle_s + self.drawn.random() * 10
            cuts = [asyncio.create_task(self._cut_link(address, each, for_s)) for each in hides]
            await self.router.start([each.address for each in self.replicas])
            if cuts:
                await asyncio.wait(cuts)

    async def _shake(self, address: str = "") -> None:
        address = address or self.drawn.choice(self.replicas).address
        self.events.note("shake", address)
        self.network.link(self.router.address, address).shake()

    async def _cut(self) -> None:
        await self._cut_link(self.router.address, self.drawn.choice(self.replicas).address)

    async def _cut_most(self) -> None:
        """All but one are behind when they are back, and fetch at once what was pushed meanwhile."""
        router, for_s = self.router.address, 5.0 + self.drawn.random() * 10
        cut = self.drawn.sample(self.replicas, len(self.replicas) - 1)
        await asyncio.gather(*(self._cut_link(router, each.address, for_s) for each in cut))

    async def _cut_peers(self) -> None:
        one, other = self.drawn.sample(self.replicas, 2)
        await self._cut_link(one.address, other.address)

    async def _cut_link(self, one: str, other: str, for_s: float | None = None) -> None:
        link = self.network.link(one, other)
        if not link.is_cut:
            self.events.note("cut", one, other)
            link.cut()
            if for_s is None:
                for_s = self.drawn.choice((1.0, 8.0, 15.0, 35.0)) * self.drawn.random()
            await asyncio.sleep(for_s)
            self.events.note("heal", one, other)
            link.heal()

    async def _end_faults(self) -> None:
        for link in self.network.links.values():
            link.heal()
        for each in self.replicas:
            if not each.is_alive:
                await each.start()
        if not self.router.is_alive:
            await self.router.start([each.address for each in self.replicas])
        self.events.note("faults end")
        for each in self.clients:
            if isinstance(each, Sleeper):
                each.process.start(each.wake_up(), "wake up")

    # --- what is seen

    async def _look(self) -> None:
        """Notes of pushes and leases when nobody is left who has them and can be reached."""
        while True:
            await asyncio.sleep(0.2)
            self._note_lost()
            self._served = {(each.address, each.num_runs): each.serves for each in self.replicas}

    def _note_lost(self) -> None:
        now_s, router = self.events.now_s, self.router.address
        reached = [
            each
            for each in self.replicas
            if each.is_alive and not self.network.link(router, each.address).is_cut and not self._is_held(each)
        ]
        served, kept = {each.serves for each in reached}, {each.serves for each in self.replicas}
        leases = {lease for each in reached for lease in each.fleet_leases}
        if any(each.is_asleep for each in reached):
            leases.add(ASLEEP)
        for push in self.events.pushes:
            if push.told_s <= now_s < push.lost_s and push.content not in served:
                push.lost_s = now_s
                self._check_not_overwritten(push, reached)
            is_gone = push.content not in kept or (push.content not in served and self._has_gone_on)
            if push.lost_s <= now_s < push.gone_s and is_gone:
                push.gone_s = now_s
        for lease in self.events.leases:
            if lease.told_s <= now_s < min(lease.lost_s, lease.until_s) and lease.lease_id not in leases:
                lease.lost_s = now_s
            left_s = now_s - lease.failed_s
            was_there = self.router.started_s < lease.failed_s
            if _UNDONE_S <= left_s < _UNDONE_S + 0.3 and was_there and lease.lease_id in leases:
                self.events.violation(f"lease {lease.lease_id} is there, {left_s:.1f} s after its pause had failed")

    def _check_not_overwritten(self, push: Push, reached: list[Replica]) -> None:
        """Nobody who can be reached has it any more: only because they have ended, or have something later."""
        for each in () if push.alone_at else reached:
            if self._served.get((each.address, each.num_runs)) == push.content and 0 <= each.serves < push.content:
                self.events.violation(f"{each.address} had push {push.content}, and was brought to {each.serves}")

    def _is_held(self, replica: Replica) -> bool:
        """Whether the router was told that another one has this replica: of a former one nobody knows yet that it is
        gone."""
        upstream = self.router.fleet.upstreams.get(replica.address) if self.router.is_alive else None
        return upstream is not None and upstream.member.is_held

    @property
    def _has_gone_on(self) -> bool:
        """Whether the router has changed anything: then it does not believe who comes later."""
        return self.router.is_alive and self.router.fleet.desired.is_own

    async def _rest(self, when: str) -> None:
        until_s = self.events.now_s + REST_S
        while self.events.now_s < until_s:
            await asyncio.sleep(0.5)
            if self.router.is_settled and {each.serves for each in self.replicas} == {self._committed}:
                self.events.note("at rest", when)
                return
            if when == "after the faults" and self._waits_for_push:
                return
        self.events.violation(f"no rest {when}: {self.router.why()}")

    @property
    def _committed(self) -> int:
        version = self.router.fleet.committed
        push_id = version.push_id if version is not None else ""
        return int(push_id.removeprefix("push-")) if push_id else 0

    @property
    def _waits_for_push(self) -> bool:
        """Whether nothing else can bring the fleet to rest: nobody has its version any more, or replicas are left to
        who has brought them something alone, and the others are ready."""
        fleet = self.router.fleet
        if fleet.committed is None:
            return False
        alone = {push.push_id for push in self.events.pushes if push.alone_at}
        left = [each for each in fleet.members if each.version is not None and each.version.push_id in alone]
        pushed = {push.content for push in self.events.pushes if not push.alone_at and push.content > self._committed}
        served = {each.serves for each in self.replicas}
        if self._committed not in served and not pushed & served:
            return True  # nobody has it any more
        if fleet.committed.is_checkpoint and pushed & served:
            return True  # nobody can bring a checkpoint to who has been pushed something
        return bool(left) and len(fleet.ready) + len(left) == len(fleet.members)

    def _check_kept(self) -> None:
        """A version that a trainer was told of is that of the fleet, or a later one is, or nobody had it any more."""
        told = [push for push in self.events.pushes if push.told_s < self.events.now_s and not push.alone_at]
        if not told or told[-1].gone_s < self.events.now_s:
            return
        last = told[-1]
        may_be = [push.content for push in self.events.pushes if push.content >= last.content and not push.is_refused]
        if self._committed not in may_be:
            self.events.violation(
                f"push {last.content} is lost: the fleet serves {self._committed}, and may serve {may_be}"
            )

    async def _last_push(self) -> bool:
        version = max(push.version for push in self.events.pushes) + 1 if self.events.pushes else 1
        for _ in range(20):
            if await self.trainer.process.start(self.trainer.push(version)):
                return True
            await asyncio.sleep(5.0)
        return False
