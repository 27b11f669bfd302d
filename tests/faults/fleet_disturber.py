"""Who kills, freezes and starts the processes of a fleet, one after the other."""

import asyncio
import random
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial

from genserve.client import AsyncClient
from genserve.errors import GenserveError
from tests.faults.fleet_states import all_ready, until
from tests.faults.fleet_work import FleetWork, deck
from tests.faults.history import Operation, Outcome
from tests.support import patience
from tests.support.patience import slow

_KINDS = {"kill": 3, "freeze": 2, "router": 1, "drain": 1, "takeover": 1, "death": 1}
_NAME = "disturber"


class FleetDisturber:
    """What was stopped goes on when it is cancelled."""

    def __init__(self, work: FleetWork, rng: random.Random) -> None:
        self._work = work
        self._processes = work.processes
        self._rng = rng
        self._kinds = deck(rng, _KINDS)
        self._num_deaths = 0

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await slow(self._rng.uniform(2.0, 8.0))
            index = self._rng.randrange(len(self._processes.addresses))
            match next(self._kinds):
                case "kill":
                    await self._kill(index)
                case "freeze":
                    await self._freeze(index)
                case "router":
                    async with self._work.calm:
                        await _to_the_end(self._processes.restart_router)
                    self._work.happened["router killed"] += 1
                case "drain":
                    async with self._work.calm:
                        await self._drain_and_add(self._processes.addresses[index])
                case "takeover":
                    async with self._work.calm:
                        await self._take_over()
                case "death":
                    await self._die()

    async def _kill(self, index: int) -> None:
        async with self._work.calm:
            await self._work.until_ready_besides(index)
            try:
                await _to_the_end(partial(self._processes.kill, index))
                await slow(self._rng.uniform(0, 2.0))
            finally:
                self._processes.restart(index)
        self._work.happened["replica killed"] += 1

    async def _freeze(self, index: int) -> None:
        async with self._work.calm:
            with suppress(ProcessLookupError):
                self._processes.signal(index, signal.SIGSTOP)
                self._work.happened["replica frozen"] += 1
                try:
                    await slow(self._rng.uniform(0.5, 6.0))
                finally:
                    self._processes.signal(index, signal.SIGCONT)

    async def _drain_and_add(self, address: str) -> None:
        async with AsyncClient(self._processes.router_address) as client:
            with suppress(GenserveError):
                await client.drain_replica(address, timeout_s=10)
                self._work.happened["replica drained"] += 1
            for _ in range(50):
                try:
                    await client.add_replica(address)
                    return
                except GenserveError:
                    await slow(0.1)

    async def _take_over(self) -> None:
        """A second router stands by, and gets all replicas when the first one is killed."""
        try:
            await _to_the_end(self._processes.start_standby)
            async with AsyncClient(self._processes.standby_address) as client:
                await until(client, lambda replicas: all(each.state == "unhealthy" for each in replicas.replicas))
                await _to_the_end(self._processes.take_over)
                self._work.moved.notify()
                await until(client, lambda replicas: any(each.state == "ready" for each in replicas.replicas))
            self._work.happened["router taken over"] += 1
        finally:
            self._processes.end_standby()

    async def _die(self) -> None:
        """Everything is killed at once; every second time when what the fleet serves is on all disks, and nobody
        writes. That version is back before anybody writes again."""
        self._num_deaths += 1
        async with AsyncExitStack() as stack:
            if is_kept := self._num_deaths % 2 == 1:
                await stack.enter_async_context(self._work.writing)
            await stack.enter_async_context(self._work.calm)
            is_kept = is_kept and await self._until_kept()
            death = Operation("death", _NAME, self._work.recorder.life, time.monotonic())
            self._work.recorder.history.operations.append(death)

            def die() -> None:
                try:
                    death.kept = self._processes.kill_all()
                    death.responded_s, death.outcome = time.monotonic(), Outcome.OK
                finally:
                    self._processes.start_all()

            await _to_the_end(die)
            self._work.happened["total death, all on disk" if is_kept else "total death"] += 1
            async with AsyncClient(self._processes.router_address) as client:
                await until(client, lambda replicas: any(each.state == "ready" for each in replicas.replicas))
                if is_kept:
                    await self._work.recorder.call(client.status(), "status", _NAME)

    async def _until_kept(self) -> bool:
        """Whether all disks have what the fleet serves. Not if a replica waits for a version that nobody pushes now."""
        async with AsyncClient(self._processes.router_address) as client:
            with suppress(AssertionError):
                await until(
                    client,
                    lambda replicas: all_ready(replicas) and self._processes.kept() == {replicas.weight_version},
                    patience.STEP_S,
                )
                return True
        return False


async def _to_the_end(step: Callable[[], None]) -> None:
    """In a thread. Also at the end of all traffic it is not left in the middle."""
    doing = asyncio.create_task(asyncio.to_thread(step))
    try:
        await asyncio.shield(doing)
    finally:
        await doing
