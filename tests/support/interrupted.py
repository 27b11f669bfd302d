"""What a push cost running answers: as the daemon tells it, and as the answers themselves show."""

import asyncio
from collections.abc import Sequence

from genserve.client import Applied, AsyncClient, Generation


async def settled(client: AsyncClient, push_id: str) -> Applied:
    """The outcome of a push, when what it replaced is freed and, if a sequence waits, it has waited."""
    async with asyncio.timeout(60):
        while True:
            applied = (await client.get_push(push_id)).applied
            assert applied is not None
            waits = applied.requests_kept > 0 and applied.paused_s > 0.0
            if applied.discard_s is not None and (applied.longest_wait_s is not None or not waits):
                return applied
            await asyncio.sleep(0.01)


def computed_before(version: int, prompt: Sequence[int], answer: Generation) -> int:
    """Tokens of one sequence that had keys and values when this version came: the last one has none yet."""
    (sequence,) = answer.sequences
    assert sequence.weight_spans[-1].version >= version, "it ended before the version came"
    return len(prompt) + sum(span.end - span.start for span in sequence.weight_spans if span.version < version) - 1
