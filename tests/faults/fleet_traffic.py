"""Clients of a fleet that do random things to it, and what happens to its processes meanwhile."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from genserve.client import AsyncClient
from tests.faults.fleet_disturber import FleetDisturber
from tests.faults.fleet_operator import LOADED, PUSHED, FleetOperator
from tests.faults.fleet_trainer import FleetTrainer
from tests.faults.fleet_work import FleetWork
from tests.faults.history import ANY_LINK
from tests.support.patience import slow

_NUM_GENERATORS = 6
_DEADLINE_S = 90.0

Step = Callable[[AsyncClient], Coroutine[Any, Any, None]]


class FleetTraffic:
    """Generators, a trainer, an operator, and somebody who kills."""

    def __init__(self, work: FleetWork, adapter: tuple[str, str]) -> None:
        """`adapter`: the directory of one, and its name among the contents."""
        self._work = work
        self._adapter = adapter

    async def run(self, duration_s: float) -> None:
        """Does so for a while. What was stopped goes on afterwards."""
        steps: list[Step] = [
            FleetGenerator(self._work, f"generate {n}", self._rng(n)).step for n in range(_NUM_GENERATORS)
        ]
        steps.append(FleetTrainer(self._work, "train", self._rng("train")).step)
        steps.append(FleetOperator(self._work, "operate", self._rng("operate"), self._adapter).step)
        works: list[Awaitable[None]] = [self._loop(step) for step in steps]
        works.append(FleetDisturber(self._work, self._rng("disturb")).run())
        tasks = [asyncio.ensure_future(each) for each in works]
        try:
            done, _ = await asyncio.wait(tasks, timeout=duration_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _rng(self, who: object) -> random.Random:
        return random.Random(f"{self._work.seed}/{who}")

    async def _loop(self, step: Step) -> None:
        """One step after the other. When another router is in charge, what was begun is given up."""
        while True:
            moved = self._work.moved.next
            async with AsyncClient(self._work.processes.router_address) as client:
                while not moved.is_set():
                    await _unless(moved, step(client))


class FleetGenerator:
    """Requests for tokens, some with adapters."""

    def __init__(self, work: FleetWork, name: str, rng: random.Random) -> None:
        self._work = work
        self._name = name
        self._rng = rng

    async def step(self, client: AsyncClient) -> None:
        """One generation, which may be cancelled."""
        rng = self._rng
        prompt = [rng.randrange(5, 100) for _ in range(rng.randrange(1, 20))]
        options: dict[str, Any] = {"max_tokens": rng.randrange(1, 120), "ignore_eos": True, "timeout_s": _DEADLINE_S}
        if rng.random() < 0.5:
            options |= {"resume": True, "text": False}
        if (name := rng.choice(("", "", PUSHED, LOADED))) in self._work.adapters:
            options["lora_name"] = name
        call = self._work.recorder.generate(client, self._name, prompt, link=ANY_LINK, **options)
        if rng.random() < 0.2:
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.random()):
                    await call
        elif (await call).error:
            await slow(0.05)


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Ends the work when the event comes."""
    doing, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (doing, waiting):
            task.cancel()
        await asyncio.wait({doing, waiting})
    if not doing.cancelled():
        doing.result()
