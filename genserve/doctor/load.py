"""Requests that generate while weights are pushed, and when their tokens came."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from genserve.client import AsyncClient

NUM_STREAMS: Final = 8
_MAX_TOKENS: Final = 1900


@dataclass(slots=True)
class Slot:
    """Requests one after the other. `arrived_at` are moments at which messages with tokens came (seconds of one
    monotonic clock), a list for each request; `versions` what the tokens were labelled with, in order. `covered` is
    false once the labels of a message did not cover its tokens."""

    arrived_at: list[list[float]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    covered: bool = True

    def num_after(self, moment: float) -> int:
        """Messages that came later."""
        return sum(each > moment for arrived_at in self.arrived_at[-2:] for each in arrived_at[-64:])


class Load:
    """Requests of one daemon: when one has all of its tokens, the next begins."""

    def __init__(self, client: AsyncClient, max_tokens: int) -> None:
        self.slots = [Slot() for _ in range(NUM_STREAMS)]
        self._client = client
        self._max_tokens = max_tokens
        self._changed = asyncio.Condition()
        self._lost = ""

    async def run(self, number: int) -> None:
        """Greedy requests, until it is cancelled or one of them is lost."""
        slot, lost = self.slots[number], ""
        while not lost:
            try:
                reason = await self._request(slot, number)
                lost = "" if reason == "length" else f"a request ended as {reason}"
            except Exception as error:
                lost = str(error)
        async with self._changed:
            self._lost = self._lost or lost
            self._changed.notify_all()

    async def wait_all(self, since: float, *, num_tokens: int = 1) -> str:
        """Returns once every slot has got so many messages with tokens after a moment: "", or why a request was lost,
        also before that."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._lost or all(slot.num_after(since) >= num_tokens for slot in self.slots)
            )
        return self._lost

    def waits_s(self, began_at: float, ended_at: float) -> list[float]:
        """Seconds between two messages of a request, for all pairs of which the later came in that time."""
        return [
            later - earlier
            for slot in self.slots
            for arrived_at in slot.arrived_at
            for earlier, later in pairwise(arrived_at)
            if began_at <= later <= ended_at
        ]

    def labels_are(self, version: int) -> bool:
        """Whether every token had a label, none went back to an older version, and the last ones have this one."""
        return all(
            slot.covered and slot.versions == sorted(slot.versions) and slot.versions[-1:] == [version]
            for slot in self.slots
        )

    async def _request(self, slot: Slot, number: int) -> str:
        """One of them; how it ended."""
        arrived_at: list[float] = []
        slot.arrived_at.append(arrived_at)
        reason = "cut off"
        deltas = self._client.stream(
            [number + 3, 7, 9], temperature=0.0, max_tokens=self._max_tokens, ignore_eos=True, text=False
        )
        async with deltas:
            async for delta in deltas:
                for output in delta.outputs:
                    num_labelled = sum(span.end - span.start for span in output.weight_spans)
                    slot.covered &= num_labelled == len(output.token_ids)
                    slot.versions += [span.version for span in output.weight_spans]
                    reason = output.finish.reason if output.finish is not None else reason
                arrived_at.append(time.monotonic())
                async with self._changed:
                    self._changed.notify_all()
        return reason


@asynccontextmanager
async def live_load(client: AsyncClient, max_model_len: int) -> AsyncIterator[Load]:
    """Requests that all have begun to generate; they are ended with the context."""
    load = Load(client, min(_MAX_TOKENS, max_model_len - 8))
    running = [asyncio.create_task(load.run(number)) for number in range(NUM_STREAMS)]
    try:
        await load.wait_all(0.0, num_tokens=2)
        yield load
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
