"""One history of a fleet, as a seed tells it: its clients, the faults that befall it, and its end.

After a while faults end, and everything that has died starts again. Then the fleet has to come to rest.
"""

import asyncio
import logging
import random
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.adapters import Adapters, lacking
from tests.simulation.clients import Client, Operator, Rollouts, Sleeper, Trainer
from tests.simulation.events import Events
from tests.simulation.faults import Faults
from tests.simulation.invariants import violations
from tests.simulation.network import Network
from tests.simulation.plan import plan_of
from tests.simulation.replica import Replica
from tests.simulation.router import RouterHost
from tests.simulation.routers import Routers
from tests.simulation.sight import Sight
from tests.simulation.virtual_time import Process, virtual_time
from tests.simulation.wrong_clocks import MOST_JUMP_S, WrongClocks

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
        loop.set_exception_handler(lines.unheard)
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
    """What genserve logs as errors, and what its tasks raise that nobody waits for: faults of ours that nobody
    foresaw."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.raised: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.raised.append(f"logged: {record.getMessage()}: {error!r}")

    def unheard(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio's handler of exceptions."""
        self.raised.append(f"raised: {context['message']}: {context.get('exception')!r}")

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
        self.plan = plan_of(seed)
        self.events = Events(loop)
        self.network = Network(drawn)
        self.replicas = [
            Replica(f"10.0.0.{n}:1", self.network, self.events) for n in range(1, drawn.randrange(2, 5) + 1)
        ]
        self.routers = Routers(self.network, self.events, are_two=self.plan.has_two_routers)
        clocks = [each.clock for each in (*self.replicas, *self.routers.hosts)]
        more = [WrongClocks(drawn, self.events, clocks).jump] if self.plan.are_clocks_wrong else []
        self.faults = Faults(drawn, self.network, self.events, self.replicas, self.routers, more)
        self.sight = Sight(
            *(self.network, self.events, self.replicas, self.routers), are_clocks_wrong=self.plan.are_clocks_wrong
        )
        self.clients: list[Client] = []
        self.are_faults_over = False

    @property
    def router(self) -> RouterHost:
        """The one that looks after the fleet."""
        return self.routers.in_charge

    def _called(self) -> str:
        """The router that a client calls: it does not know which one of two has the replicas."""
        router = self.router if self.are_faults_over else self.routers.any(self.drawn)
        return router.address

    def _client(self, kind: type[Any], host: str) -> Any:
        client = kind(self.network, self.events, self._called)
        self.clients.append(client)
        client.process = Process(host)
        return client

    async def play(self) -> Outcome:
        """From the start to the end."""
        addresses = [each.address for each in self.replicas]
        for each in self.replicas:
            await each.start()
        for router in self.routers.running:
            await router.start(addresses)
        self.trainer = self._client(Trainer, "trainer")
        self.trainer.replicas = addresses
        self._client(Operator, "operator")
        self._client(Rollouts, "rollouts")
        if self.drawn.random() < 0.3:
            self._client(Sleeper, "sleeper")
        if self.plan.has_adapters:
            self._client(Adapters, "adapters").replicas = self.replicas
        running = [each.process.start(each.run(), "client") for each in self.clients]
        watching = asyncio.create_task(self.sight.look())
        if self.drawn.random() < 0.5:  # what befalls the fleet when nobody changes it any more is told by what it is
            loop, quiet_s = asyncio.get_running_loop(), self.drawn.random() * self.plan.faults_s
            for task in running:
                loop.call_later(quiet_s, task.cancel)
        await self.faults.happen(self.plan.faults_s)
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await self.faults.end()
        self.are_faults_over = True
        self._wake_up()
        await self._rest("after the faults")
        self._check_kept()
        self._wake_up()  # a router may have answered that had not heard yet that another one has put it to sleep
        if not await self._last_push():
            self.events.violation(f"the last push was not applied: {self.router.why()}")
        await self._rest("after the last push")
        for wrong in lacking(self.events.adapters, self.replicas):
            self.events.violation(wrong)
        for each in (*running, watching):
            if each.done() and not each.cancelled() and (error := each.exception()) is not None:
                raise error
        watching.cancel()
        found = [*self.network.faults, *self.errors, *violations(self.events)]
        for replica in self.replicas:
            if hasattr(replica, "engine"):
                found += replica.engine.misuses
        return Outcome(self.seed, found, self.events)

    def _wake_up(self) -> None:
        for each in self.clients:
            if isinstance(each, Sleeper):
                each.process.start(each.wake_up(), "wake up")

    async def _rest(self, when: str) -> None:
        until_s = self.events.now_s + REST_S + (MOST_JUMP_S if self.plan.are_clocks_wrong else 0.0)
        while self.events.now_s < until_s:
            await asyncio.sleep(0.5)
            if self.router.is_settled and {each.serves for each in self.replicas} == {self._committed}:
                self.events.note("at rest", when)
                return
            if when == "after the faults" and self._waits_for_push:
                return
        self.events.violation(f"no rest {when}: {'; '.join(each.why() for each in self.routers.running)}")

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
        ready = {each.address for each in fleet.ready}
        others = [each for each in fleet.members if each.address not in ready]
        left = [each for each in others if each.version is not None and each.version.push_id in alone]
        pushed = {push.content for push in self.events.pushes if not push.alone_at and push.content > self._committed}
        served = {each.serves for each in self.replicas}
        if self._committed not in served and (not pushed & served or fleet.desired.is_own):
            return True  # nobody has it any more; a router that has changed something believes no older record
        if fleet.committed.is_checkpoint and pushed & served:
            return True  # nobody can bring a checkpoint to who has been pushed something
        return bool(left) and left == others

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
