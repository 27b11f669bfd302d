"""Streams that generate while weights are pushed, and when their tokens came."""

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
class Stream:
    """One request: moments at which its tokens came (seconds of one monotonic clock), and the versions they were
    labelled with, in order. `covered` is false once a message's labels did not cover its tokens."""

    arrived_at: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    covered: bool = True


class Load:
    """Streams of one daemon, all of them under way."""

    def __init__(self, client: AsyncClient, max_tokens: int) -> None:
        self.streams = [Stream() for _ in range(NUM_STREAMS)]
        self._client = client
        self._max_tokens = max_tokens
        self._changed = asyncio.Condition()
        self._ended: list[str] = []

    async def run(self, number: int) -> None:
        """One request, greedy, until it is cancelled."""
        stream, why = self.streams[number], "it came to its end"
        try:
            deltas = self._client.stream(
                [number + 3, 7, 9], temperature=0.0, max_tokens=self._max_tokens, ignore_eos=True, text=False
            )
            async with deltas:
                async for delta in deltas:
                    for output in delta.outputs:
                        num_labelled = sum(span.end - span.start for span in output.weight_spans)
                        stream.covered &= num_labelled == len(output.token_ids)
                        stream.versions += [span.version for span in output.weight_spans]
                    stream.arrived_at.append(time.monotonic())
                    async with self._changed:
                        self._changed.notify_all()
        except Exception as error:
            why = str(error)
        async with self._changed:
            self._ended.append(why)
            self._changed.notify_all()

    async def wait_all(self, since: float, *, num_tokens: int = 1) -> str:
        """Returns once every stream has got so many messages with tokens after a moment: "", or why one has ended."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._ended or all(self._after(stream, since) >= num_tokens for stream in self.streams)
            )
        return self._ended[0] if self._ended else ""

    def waits_s(self, began_at: float, ended_at: float) -> list[float]:
        """Seconds between two messages of a stream, for all pairs of which the later came in that time."""
        return [
            later - earlier
            for stream in self.streams
            for earlier, later in pairwise(stream.arrived_at)
            if began_at <= later <= ended_at
        ]

    @staticmethod
    def _after(stream: Stream, since: float) -> int:
        return sum(moment > since for moment in stream.arrived_at[-64:])


@asynccontextmanager
async def live_load(client: AsyncClient, max_model_len: int) -> AsyncIterator[Load]:
    """Streams that all have begun to generate; they are ended with the context."""
    load = Load(client, min(_MAX_TOKENS, max_model_len - 8))
    running = [asyncio.create_task(load.run(number)) for number in range(NUM_STREAMS)]
    try:
        await load.wait_all(0.0, num_tokens=2)
        yield load
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
