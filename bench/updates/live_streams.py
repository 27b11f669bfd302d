"""Streams that go on and on while something else happens to their engine, and how long each token let wait."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from genserve.cli.bench import percentile
from genserve.client import AsyncClient

MAX_TOKENS = 1900
WARM_UP_S = 2.0


class LiveStreams:
    """`arrived_at` has a list of moments for each request that was made; one ends, the next begins."""

    def __init__(self, num_streams: int) -> None:
        self.num_streams = num_streams
        self.arrived_at: list[list[float]] = []

    async def run(self, client: AsyncClient, seed: int) -> None:
        """One slot: greedy requests, one after the other, for ever."""
        while True:
            moments: list[float] = []
            self.arrived_at.append(moments)
            async with client.stream(
                [seed + 1, 7, 9], temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, text=False, timeout_s=None
            ) as deltas:
                async for _ in deltas:
                    moments.append(time.monotonic())

    def waits(self, began_at: float, ended_at: float) -> list[float]:
        """Seconds between two tokens of a stream, for all pairs that came in that time."""
        return [
            later - earlier
            for moments in self.arrived_at
            for earlier, later in zip(moments, moments[1:], strict=False)  # noqa: RUF007 - a copy: they grow meanwhile
            if began_at <= earlier and later <= ended_at
        ]

    def figures(self, *spans: tuple[float, float]) -> dict[str, float]:
        """Of the tokens of those times. Raises ValueError when there were none."""
        waits_s = [wait_s for span in spans for wait_s in self.waits(*span)]
        seconds = sum(ended_at - began_at for began_at, ended_at in spans)
        if not waits_s:
            raise ValueError(f"no stream got two tokens in {seconds:.2f} s")
        return {
            "inter_token_p50_ms": 1000 * percentile(waits_s, 0.5),
            "inter_token_p99_ms": 1000 * percentile(waits_s, 0.99),
            "longest_ms": 1000 * max(waits_s),
            "tokens_per_s": len(waits_s) / seconds,
            "seconds": seconds,
        }

    async def after(self, moment: float, *, since: float) -> float:
        """The longest wait that began since `since`, once every stream has gone on after `moment`."""
        while not all(moments and moments[-1] > moment for moments in self.arrived_at[-self.num_streams :]):
            await asyncio.sleep(0.05)
        return max(self.waits(since, time.monotonic()))


@asynccontextmanager
async def live_streams(address: str, num_streams: int) -> AsyncIterator[LiveStreams]:
    """So many streams, warmed up; an error of one of them is raised at the end."""
    streams = LiveStreams(num_streams)
    async with AsyncClient(address) as client:
        running = [asyncio.create_task(streams.run(client, seed)) for seed in range(num_streams)]
        try:
            await asyncio.sleep(WARM_UP_S)
            yield streams
        finally:
            for task in running:
                task.cancel()
            for task in running:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
