"""What a daemon answers, to be compared with what plain vLLM does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from genserve.client import AsyncClient
from tests.support.plain_vllm import PROMPTS, Reference
from tests.support.reference import MAX_TOKENS

GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}


async def wait_idle(client: AsyncClient, timeout_s: float = 60.0) -> None:
    """Waits until the daemon has nothing to do."""
    async with asyncio.timeout(timeout_s):
        while (await client.status()).load.running:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def ends_early(client: AsyncClient, *, num_tokens: int = 1900) -> AsyncIterator[None]:
    """What runs before the block, of so many tokens each, ends because of what is done in it, and not by itself: a
    request that begins now and is as long is far from its end then. Nothing else runs."""
    counted, begun = 0, asyncio.Event()

    async def count() -> None:
        nonlocal counted
        async for delta in client.stream([9, 9], max_tokens=num_tokens, ignore_eos=True):
            counted += sum(len(output.token_ids) for output in delta.outputs)
            begun.set()

    clock = asyncio.create_task(count())
    await begun.wait()
    yield
    async with asyncio.timeout(60):
        while (await client.status()).load.running > 1:
            await asyncio.sleep(0.01)
    assert counted < 0.9 * num_tokens, "they may have run to their ends"
    clock.cancel()
    await asyncio.wait([clock])
    await wait_idle(client)


async def next_version(client: AsyncClient) -> int:
    """One above the served version."""
    return (await client.get_weights()).weight_version + 1


async def greedy_outputs(client: AsyncClient) -> list[list[int]]:
    """Greedy tokens of the reference prompts, one prompt at a time."""
    return [(await client.generate(prompt, **GREEDY)).token_ids for prompt in PROMPTS]


def outputs_of(reference: Reference) -> list[list[int]]:
    """The same of plain vLLM."""
    return [output["token_ids"] for output in reference["outputs"]]


async def state_of(client: AsyncClient) -> tuple[list[list[int]], dict[str, Any]]:
    """Greedy outputs, and the digest of every live weight."""
    served = await client.get_weights(include_digests=True)
    return await greedy_outputs(client), {f"{rank} {name}": value for (rank, name), value in served.digests.items()}
