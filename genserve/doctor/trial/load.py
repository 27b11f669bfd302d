"""Requests that generate while weights are pushed, and the times of their tokens."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from genserve.client import AsyncClient
from genserve.errors import QueueFullError

NUM_STREAMS: Final = 8
_MAX_TOKENS: Final = 1900
_RETRY_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """The daemon's limits: tokens of a sequence, prompt and output together, and sequences that run at once."""

    max_model_len: int
    max_sequences: int

    @property
    def num_streams(self) -> int:
        """The number of requests that can all generate: one that waits for another would have no tokens during a
        push."""
        return max(1, min(NUM_STREAMS, self.max_sequences))

    def fitted(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
        """As much of the prompt as leaves enough output tokens, and the number of these."""
        kept = list(prompt[: max(1, self.max_model_len // 2)])
        return kept, max(1, min(max_tokens, self.max_model_len - len(kept)))


@dataclass(slots=True)
class Slot:
    """The requests of one slot, one after the other. `arrived_at` are the times of messages with tokens (seconds of one
    monotonic clock), a list for each request. `versions` are the labels of the tokens, in order. `covered` is false if
    the labels of a message did not cover its tokens."""

    arrived_at: list[list[float]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    covered: bool = True

    def num_after(self, moment: float) -> int:
        """The number of messages that arrived after `moment`."""
        return sum(each > moment for arrived_at in self.arrived_at[-4:] for each in arrived_at[-64:])


class LiveLoad:
    """The requests to one daemon: when a request has all of its tokens, the next one begins."""

    def __init__(self, client: AsyncClient, limits: LoadLimits) -> None:
        self.slots = [Slot() for _ in range(limits.num_streams)]
        self._client = client
        self._limits = limits
        self._changed = asyncio.Condition()
        self._lost = ""

    async def run(self, number: int) -> None:
        """Sends greedy requests until it is cancelled or one of them is lost."""
        slot, lost = self.slots[number], ""
        while not lost:
            try:
                reason = await self._request(slot, number)
                lost = "" if reason == "length" else f"a request ended as {reason}"
            except QueueFullError as error:  # it has not begun: earlier requests still count for a moment
                slot.arrived_at.pop()
                await asyncio.sleep(retry_after_s(error))
            except Exception as error:
                lost = str(error)
        async with self._changed:
            self._lost = self._lost or lost
            self._changed.notify_all()

    async def wait_all(self, since: float, *, num_tokens: int = 1) -> str:
        """Waits until every slot has received `num_tokens` messages with tokens after `since`. Returns "", or why a
        request was lost, as soon as one is lost."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._lost or all(slot.num_after(since) >= num_tokens for slot in self.slots)
            )
        return self._lost

    def waits_s(self, began_at: float, ended_at: float) -> list[float]:
        """Seconds between two messages of a request, for all pairs whose later message arrived in this period."""
        return [
            later - earlier
            for slot in self.slots
            for arrived_at in slot.arrived_at
            for earlier, later in pairwise(arrived_at)
            if began_at <= later <= ended_at
        ]

    def labels_are(self, version: int) -> bool:
        """Whether every token had a label, no label went back to an older version, and the last ones are this
        version."""
        return all(
            slot.covered and slot.versions == sorted(slot.versions) and slot.versions[-1:] == [version]
            for slot in self.slots
        )

    async def _request(self, slot: Slot, number: int) -> str:
        """Runs one request, and returns how it ended."""
        arrived_at: list[float] = []
        slot.arrived_at.append(arrived_at)
        reason = "cut off"
        prompt, max_tokens = self._limits.fitted([number + 3, 7, 9], _MAX_TOKENS)
        deltas = self._client.stream(prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True, text=False)
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


def retry_after_s(error: QueueFullError) -> float:
    """When a refused request may be repeated, in seconds."""
    return _RETRY_S if error.retry_after_s is None else error.retry_after_s


@asynccontextmanager
async def live_load(client: AsyncClient, limits: LoadLimits) -> AsyncIterator[LiveLoad]:
    """Requests that have all begun to generate. They are ended with the context."""
    load = LiveLoad(client, limits)
    running = [asyncio.create_task(load.run(number)) for number in range(limits.num_streams)]
    try:
        await load.wait_all(0.0, num_tokens=2)
        yield load
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
