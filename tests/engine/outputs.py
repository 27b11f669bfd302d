"""What a daemon answers, to be compared with what plain vLLM does."""

import asyncio
import time
from typing import Any

from genserve.client import AsyncClient
from tests.support.plain_vllm import PROMPTS, Reference
from tests.support.reference import MAX_TOKENS

GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}


async def wait_idle(client: AsyncClient, timeout_s: float = 1.0) -> float:
    """Seconds until the daemon has nothing to do; fails after `timeout_s`."""
    started = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while (await client.status()).load.running:
            await asyncio.sleep(0.01)
    return time.monotonic() - started


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
