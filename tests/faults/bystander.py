"""A client that does no harm, while others do: it wants its tokens all the time."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Self

from genserve.client import AsyncClient
from tests.support import patience
from tests.support.oracle import MAX_TOKENS
from tests.support.plain_vllm import PROMPTS
from tests.support.subject import Subject

CALL_TIMEOUT_S = 90.0
"""Far above what a call takes on a busy machine."""


class Bystander:
    """Asks for the tokens that the oracle knows of checkpoint a, one call after the other, on a connection of its own.
    `latencies_s` has the time of each."""

    def __init__(self, client: AsyncClient, known: list[int]) -> None:
        self._client = client
        self._known = known
        self.latencies_s: list[float] = []
        self.num_in_a_row = 0

    @classmethod
    @asynccontextmanager
    async def of(cls, subject: Subject) -> AsyncIterator[Self]:
        """Is at work in the block, over a connection made before it. Raises what its calls raise."""
        async with AsyncClient(subject.process.address) as client:
            bystander = cls(client, subject.oracle.known["a"].outputs[0][0])
            await bystander.ask()
            working = asyncio.create_task(bystander.work())
            try:
                yield bystander
            finally:
                working.cancel()
                with suppress(asyncio.CancelledError):
                    await working

    async def ask(self) -> None:
        """One call."""
        began_s = time.monotonic()
        options = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, "timeout_s": CALL_TIMEOUT_S}
        generation = await self._client.generate(PROMPTS[0], **options)  # type: ignore[arg-type]
        assert generation.token_ids == self._known
        self.latencies_s.append(time.monotonic() - began_s)
        self.num_in_a_row += 1

    async def work(self) -> None:
        while True:
            await self.ask()

    async def until_served(self, count: int = 10) -> None:
        """Returns when so many calls in a row were answered from now on."""
        self.num_in_a_row = 0
        await patience.until(lambda: self.num_in_a_row >= count, 4 * patience.STEP_S)

    def percentile_s(self, share: float) -> float:
        """Of the latencies so far."""
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
