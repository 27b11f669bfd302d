"""What those who are at work in the history of a fleet have in common."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping
from typing import Any

from genserve.aio import Change
from genserve.client import AsyncClient
from genserve.errors import GenserveError
from tests.faults.fleet_processes import FleetProcesses
from tests.faults.fleet_states import ready
from tests.faults.recorder import AnswerLost, Recorder
from tests.support.patience import slow


class FleetWork:
    """`happened` counts what was done to processes. `moved`: another router is in charge. `writing` is held while
    weights are written, and taken before `calm`, under which nothing new happens to processes. `adapters`: names of
    those that may be loaded."""

    def __init__(self, recorder: Recorder, processes: FleetProcesses, seed: str) -> None:
        self.recorder = recorder
        self.processes = processes
        self.seed = seed
        self.happened: Counter[str] = Counter()
        self.moved = Change()
        self.writing = asyncio.Lock()
        self.calm = asyncio.Lock()
        self.adapters: set[str] = set()

    async def until_ready_besides(self, index: int) -> None:
        """Waits until a replica has the version of the fleet besides this one: the last copy is not to be lost."""
        async with AsyncClient(self.processes.router_address) as client:
            while True:
                try:
                    if ready(await client.list_replicas(timeout_s=5)) - {self.processes.addresses[index]}:
                        return
                except GenserveError:
                    pass  # the router starts
                await slow(0.1)


def deck(rng: random.Random, counts: Mapping[str, int]) -> Iterator[str]:
    """Kinds at random, in each round so many of each."""
    cards = [kind for kind, count in counts.items() for _ in range(count)]
    while True:
        rng.shuffle(cards)
        yield from cards


async def given_up(call: Awaitable[Any], after_s: float) -> Any:
    """A trainer that stops in the middle, as one that is killed. Its push may still be applied."""
    try:
        async with asyncio.timeout(after_s):
            return await call
    except TimeoutError:
        raise AnswerLost from None
