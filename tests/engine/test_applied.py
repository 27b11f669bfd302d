"""What a push costs those who generate, as its outcome tells it, on real vLLM."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from genserve.client import Applied, AsyncClient, Generation
from tests.engine.outputs import next_version
from tests.support.interrupted import computed_before, settled

pytestmark = pytest.mark.long(
    "genserve/weights/apply.py",
    "genserve/control/pause.py",
    "genserve/engine/vllm/clients",
    "genserve/engine/vllm/weights.py",
)

PROMPTS = [[1, 2, 3], [4] * 200, [9, 8]]
"""One is longer than a block of the KV cache."""


@asynccontextmanager
async def running(client: AsyncClient, prompts: Sequence[Sequence[int]]) -> AsyncIterator[list[Generation]]:
    """Endless answers to these prompts, each with a token at least; what they have at the end."""
    answers = [Generation() for _ in prompts]
    begun = [asyncio.Event() for _ in prompts]

    async def one(i: int) -> None:
        async for delta in client.stream(list(prompts[i]), temperature=0.0, max_tokens=1700, ignore_eos=True):
            answers[i].add(delta)
            begun[i].set()

    tasks = [asyncio.create_task(one(i)) for i in range(len(prompts))]
    try:
        await asyncio.gather(*(each.wait() for each in begun))
        yield answers
        await client.abort(all=True)
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)


async def pushed(client: AsyncClient, checkpoint: Path, **options: str) -> Applied:
    """The outcome of a push, as its answer has it and then as GetPush does."""
    result = await client.push_weights(checkpoint, version=await next_version(client), **options)  # type: ignore[arg-type]
    assert result.applied is not None
    assert result.applied.longest_wait_s is None and result.applied.discard_s is None, "the answer waited for it"
    later = await settled(client, result.push.push_id)
    assert result.applied.recomputed_tokens == later.recomputed_tokens
    return later


@pytest.mark.parametrize(("kv_policy", "prepare_mode"), [("recompute", "running"), ("reuse", "paused")])
async def test_a_push_tells_what_running_answers_lose(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path], kv_policy: str, prepare_mode: str
) -> None:
    """The tokens that had keys and values, if these were dropped; and a wait of which the exchange is a part."""
    async with running(client, PROMPTS) as answers:
        applied = await pushed(client, checkpoints["b"], kv_policy=kv_policy, prepare_mode=prepare_mode)
    computed = sum(map(computed_before, [applied.active_version] * 3, PROMPTS, answers))
    assert applied.requests_kept == 3
    assert applied.recomputed_tokens == (computed if kv_policy == "recompute" else 0)
    # The engine is still at a step when the pause begins, and answers the resume before it has made one.
    stopped_s = applied.paused_s - applied.step_s["pause"] - applied.step_s["resume"]
    assert applied.longest_wait_s is not None and applied.longest_wait_s > stopped_s > 0.0
    assert applied.discard_s is not None and applied.discard_s > 0.0


@pytest.mark.parametrize("pause_mode", ["keep", "wait", "abort"])
async def test_nobody_waits_for_a_push_into_an_engine_with_nothing_to_do(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path], pause_mode: str
) -> None:
    """No sequence is without output, so there is no longest time."""
    applied = await pushed(client, checkpoints["b"], pause_mode=pause_mode)
    assert (applied.recomputed_tokens, applied.longest_wait_s) == (0, None)


async def test_requests_that_have_no_token_yet_are_not_counted(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path]
) -> None:
    """They came during a pause, and have computed nothing."""
    async with client.paused(kv_policy="reuse") as lease:
        waiting = asyncio.create_task(client.generate([1, 2, 3], max_tokens=4, ignore_eos=True))
        async with asyncio.timeout(30):
            while (state := (await client.status()).state).running_requests + state.waiting_requests == 0:
                await asyncio.sleep(0.01)
        applied = await pushed(client, checkpoints["b"], pause_lease_id=lease.lease_id)
        assert (applied.requests_kept, applied.recomputed_tokens) == (1, 0)
    assert len((await waiting).token_ids) == 4


@pytest.mark.parametrize("before", ["recompute", "reuse"])
async def test_a_push_into_a_pause_counts_only_what_it_drops_itself(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path], before: str
) -> None:
    """What the pause has dropped is not dropped again; and how long the pause lasts is not the push's doing."""
    async with running(client, PROMPTS) as answers:
        async with client.paused(kv_policy=before) as lease:  # type: ignore[arg-type]
            applied = await pushed(client, checkpoints["b"], pause_lease_id=lease.lease_id)
            again = await pushed(client, checkpoints["b"], pause_lease_id=lease.lease_id)
        after = await pushed(client, checkpoints["b"])
    counts = [
        sum(map(computed_before, [version] * 3, PROMPTS, answers))
        for version in (applied.active_version, after.active_version)
    ]
    assert applied.recomputed_tokens == (counts[0] if before == "reuse" else 0)
    assert (again.recomputed_tokens, after.recomputed_tokens) == (0, counts[1])
    assert (applied.longest_wait_s, again.longest_wait_s) == (None, None)
    assert after.longest_wait_s is not None
