"""Clients of a fleet that do random things to it, and what happens to its processes meanwhile."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from genserve.client import AsyncClient
from genserve.errors import GenserveError
from tests.faults.fleet_processes import FleetProcesses
from tests.faults.history import ANY_LINK, PushIntent
from tests.faults.recorder import AnswerLost, Recorder
from tests.support.patience import slow

_NUM_GENERATORS = 6
_PUSH_TIMEOUT_S = 60.0
_DEADLINE_S = 90.0


class FleetTraffic:
    """Generators, a trainer, an operator, and somebody who kills. `happened` counts what was done to processes."""

    def __init__(self, recorder: Recorder, fleet: FleetProcesses, seed: str) -> None:
        self._recorder = recorder
        self._fleet = fleet
        self._seed = seed
        self._version = 0
        self.happened: Counter[str] = Counter()

    async def run(self, duration_s: float) -> None:
        """Does so for a while. What was stopped goes on afterwards."""
        works: list[Callable[[AsyncClient, random.Random, str], Awaitable[None]]] = [
            *[self._generate] * _NUM_GENERATORS,
            self._train,
            self._operate,
        ]
        tasks = [asyncio.create_task(self._loop(work, number)) for number, work in enumerate(works)]
        tasks.append(asyncio.create_task(self._disturb(random.Random(f"{self._seed}/disturb"))))
        try:
            done, _ = await asyncio.wait(tasks, timeout=duration_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _loop(self, work: Callable[[AsyncClient, random.Random, str], Awaitable[None]], number: int) -> None:
        name, rng = f"{work.__name__.strip('_')} {number}", random.Random(f"{self._seed}/{number}")
        async with AsyncClient(self._fleet.router_address) as client:
            while True:
                await work(client, rng, name)

    async def _generate(self, client: AsyncClient, rng: random.Random, name: str) -> None:
        prompt = [rng.randrange(5, 100) for _ in range(rng.randrange(1, 20))]
        options: dict[str, Any] = {"max_tokens": rng.randrange(1, 120), "ignore_eos": True, "timeout_s": _DEADLINE_S}
        if rng.random() < 0.5:
            options |= {"resume": True, "text": False}
        if rng.random() < 0.2:
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.random()):
                    await self._recorder.generate(client, name, prompt, link=ANY_LINK, **options)
        else:
            stream = await self._recorder.generate(client, name, prompt, link=ANY_LINK, **options)
            if stream.error:
                await slow(0.05)

    async def _train(self, client: AsyncClient, rng: random.Random, name: str) -> None:
        await slow(rng.uniform(0, 1.0))
        self._version += rng.randrange(1, 3)
        content = rng.choice(self._recorder.contents.names)
        intent = PushIntent(f"push {self._version}", self._version, content)
        call = client.push_weights(
            self._recorder.contents.whole(content),
            version=intent.version,
            push_id=intent.push_id,
            timeout_s=_PUSH_TIMEOUT_S,
            chunk_bytes=1 << 16,
        )
        if rng.random() < 0.15:
            call = _given_up(call, rng.random())
        await self._recorder.call(call, "push", name, push=intent)

    async def _operate(self, client: AsyncClient, rng: random.Random, name: str) -> None:
        await slow(rng.uniform(0.5, 4.0))
        ttl_s = rng.uniform(0.3, 2.0)
        paused = await self._recorder.call(client.pause(ttl_s=ttl_s, timeout_s=20), "pause", name, ttl_s=ttl_s)
        if paused is None or rng.random() < 0.3:
            return
        await slow(rng.uniform(0, ttl_s / 2))
        lease_id = paused.lease.lease_id
        await self._recorder.call(client.resume(lease_id), "resume", name, lease_id=lease_id)

    async def _disturb(self, rng: random.Random) -> None:
        while True:
            await slow(rng.uniform(2.0, 8.0))
            index = rng.randrange(len(self._fleet.addresses))
            match rng.choice(("kill", "kill", "freeze", "router", "drain")):
                case "kill":
                    try:
                        await asyncio.to_thread(self._fleet.kill, index)
                        await slow(rng.uniform(0, 2.0))
                    finally:
                        self._fleet.restart(index)
                    self.happened["replica killed"] += 1
                case "freeze":
                    with suppress(ProcessLookupError):
                        self._fleet.signal(index, signal.SIGSTOP)
                        self.happened["replica frozen"] += 1
                        try:
                            await slow(rng.uniform(0.5, 6.0))
                        finally:  # also at the end of all traffic
                            self._fleet.signal(index, signal.SIGCONT)
                case "router":
                    restarting = asyncio.create_task(asyncio.to_thread(self._fleet.restart_router))
                    try:
                        await asyncio.shield(restarting)
                    finally:  # also at the end of all traffic, after which it is to be there
                        await restarting
                    self.happened["router killed"] += 1
                case "drain":
                    await self._drain_and_add(self._fleet.addresses[index])

    async def _drain_and_add(self, address: str) -> None:
        async with AsyncClient(self._fleet.router_address) as client:
            with suppress(GenserveError):
                await client.drain_replica(address, timeout_s=10)
                self.happened["replica drained"] += 1
            for _ in range(50):
                try:
                    await client.add_replica(address)
                    return
                except GenserveError:
                    await slow(0.1)


async def _given_up(call: Awaitable[Any], after_s: float) -> Any:
    """A trainer that stops in the middle, as one that is killed. Its push may still be applied."""
    try:
        async with asyncio.timeout(after_s):
            return await call
    except TimeoutError:
        raise AnswerLost from None
