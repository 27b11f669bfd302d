"""One stretch of a training run: streams that go on and on, updates at their times, and what the streams felt of them.

The same code plans and records for genserve and for a plain engine: only who generates and who pushes differ.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

from genserve.cli.bench import percentile

WARM_UP_S = 3.0
PROMPT_TOKENS, MAX_TOKENS = 64, 1900


@dataclass(frozen=True, slots=True)
class Plan:
    """`num_pushes` updates, every `interval_s`, the first one at once; it ends an interval after the last is due. One
    that takes longer than the interval delays the next. `way` is None for no update."""

    num_streams: int
    interval_s: float
    num_pushes: int
    seed: int
    way: str | None = None
    checkpoints: list[str] = field(default_factory=list)
    prompt_tokens: int = PROMPT_TOKENS
    max_tokens: int = MAX_TOKENS

    @property
    def window_s(self) -> float:
        """How long it takes."""
        return self.interval_s * self.num_pushes

    def prompts(self, slot: int) -> Iterator[list[int]]:
        """Those of one stream, for ever; others than with any other seed, so that no prefix of them is cached."""
        generator = random.Random(1000 * self.seed + slot)
        while True:
            yield [generator.randrange(1, 500) for _ in range(self.prompt_tokens)]


@dataclass(slots=True)
class Window:
    """What was seen. `arrivals`: of each stream (moment, number of tokens, version that sampled them), versions counted
    from 0; `pushes`: (begin, end) of each, the end being the answer that the trainer gets. All moments are of the
    machine's monotonic clock."""

    num_streams: int
    arrivals: list[list[tuple[float, int, int]]] = field(default_factory=list)
    pushes: list[tuple[float, float]] = field(default_factory=list)
    began_at: float = 0.0
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        self.arrivals = self.arrivals or [[] for _ in range(self.num_streams)]

    async def carry_out(self, plan: Plan, push: Callable[[int], Awaitable[None]]) -> None:
        """Warms up, waits out the window and pushes at the times planned. Returns when the last push is answered."""
        await self._every_stream_has_begun()
        await asyncio.sleep(WARM_UP_S)
        self.began_at = time.monotonic()
        self.ended_at = self.began_at + plan.window_s
        for number in range(plan.num_pushes if plan.way is not None else 0):
            await asyncio.sleep(max(self.began_at + number * plan.interval_s - time.monotonic(), 0.0))
            if (begins_at := time.monotonic()) >= self.ended_at:
                break  # the updates before took that long
            await push(number)
            self.pushes.append((begins_at, time.monotonic()))
        await asyncio.sleep(max(self.ended_at - time.monotonic(), 0.0))

    async def _every_stream_has_begun(self) -> None:
        async with asyncio.timeout(120.0):
            while not all(self.arrivals):
                await asyncio.sleep(0.05)

    def figures(self) -> dict[str, float]:
        """Of the window. Raises ValueError if no token came in it."""
        inside = [each for arrivals in self.arrivals for each in arrivals if self._has(each[0])]
        if not inside:
            raise ValueError("no token came")
        waits_s = [wait_s for arrivals in self.arrivals for wait_s in self._waits(arrivals)]
        figures = {
            "tokens_per_s": sum(count for _, count, _ in inside) / (self.ended_at - self.began_at),
            "inter_token_p99_ms": 1000 * percentile(waits_s, 0.99),
            "longest_wait_s": max(waits_s),
            "pushes": float(len(self.pushes)),
        }
        return figures | self._of_pushes() if self.pushes else figures

    def _has(self, moment: float) -> bool:
        return self.began_at < moment <= self.ended_at

    def _waits(self, arrivals: list[tuple[float, int, int]]) -> Iterator[float]:
        """Seconds between two messages of a stream, a request's end and the next one's first token included; and the
        wait that the end of the window cuts off."""
        moments = [moment for moment, _, _ in arrivals if moment <= self.ended_at]
        moments = [*moments, self.ended_at]
        return (later - earlier for earlier, later in itertools.pairwise(moments) if later > self.began_at)

    def _of_pushes(self) -> dict[str, float]:
        first_s, num_old, num_all = [], 0, 0
        every = sorted(each for arrivals in self.arrivals for each in arrivals)
        for number, (begins_at, ends_at) in enumerate(self.pushes):
            is_last = number + 1 == len(self.pushes)
            until = max(self.ended_at, ends_at) if is_last else self.pushes[number + 1][0]
            after = [each for each in every if begins_at < each[0] <= until]
            first_s += [moment - begins_at for moment, _, version in after if version > number][:1]
            num_old += sum(count for _, count, version in after if version <= number)
            num_all += sum(count for _, count, _ in after)
        figures = {
            "push_s": median(ends_at - begins_at for begins_at, ends_at in self.pushes),
            "old_share": num_old / num_all if num_all else 1.0,
        }
        return figures | ({"first_new_s": median(first_s)} if first_s else {})
