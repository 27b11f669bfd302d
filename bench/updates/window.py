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

WARM_UP_S, TIMEOUT_S = 3.0, 180.0
PROMPT_TOKENS, MAX_TOKENS = 64, 1900


@dataclass(frozen=True, slots=True)
class Plan:
    """`num_pushes` updates, every `interval_s`, the first one at once; one that takes longer than the interval delays
    the next. It ends an interval after the last is due, but not before every stream has a token of the last version:
    what the last push costs counts as what the others cost. `way` is None for no update."""

    num_streams: int
    interval_s: float
    num_pushes: int
    seed: int
    way: str | None = None
    checkpoints: list[str] = field(default_factory=list)
    prompt_tokens: int = PROMPT_TOKENS
    max_tokens: int = MAX_TOKENS

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
        """Warms up, pushes at the times planned and waits for the end of the window."""
        await self._every_stream_has(version=0)
        await asyncio.sleep(WARM_UP_S)
        self.began_at = time.monotonic()
        for number in range(plan.num_pushes if plan.way is not None else 0):
            await _sleep_until(self.began_at + number * plan.interval_s)
            begins_at = time.monotonic()
            await push(number)
            self.pushes.append((begins_at, time.monotonic()))
        await _sleep_until(self.began_at + plan.num_pushes * plan.interval_s)
        await self._every_stream_has(version=len(self.pushes))
        self.ended_at = time.monotonic()

    async def _every_stream_has(self, version: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not all(arrivals and arrivals[-1][2] >= version for arrivals in self.arrivals):
                await asyncio.sleep(0.02)

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
            "window_s": self.ended_at - self.began_at,
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
        first_s, all_s, num_old, num_all = [], [], 0, 0
        begins = [begins_at for begins_at, _ in self.pushes]
        for number, (begins_at, until) in enumerate(zip(begins, [*begins[1:], self.ended_at], strict=True)):
            new_at = [next(moment for moment, _, version in arrivals if version > number) for arrivals in self.arrivals]
            first_s.append(min(new_at) - begins_at)
            all_s.append(max(new_at) - begins_at)
            for arrivals in self.arrivals:
                after = [each for each in arrivals if begins_at < each[0] <= until]
                num_old += sum(count for _, count, version in after if version <= number)
                num_all += sum(count for _, count, _ in after)
        return {
            "push_s": median(ends_at - begins_at for begins_at, ends_at in self.pushes),
            "first_new_s": median(first_s),
            "all_new_s": median(all_s),
            "old_share": num_old / num_all,
        }


async def _sleep_until(moment: float) -> None:
    await asyncio.sleep(max(moment - time.monotonic(), 0.0))
