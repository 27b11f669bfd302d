"""Pause, resume and status through gRPC against real vLLM."""

import asyncio
import time
from typing import Any

import pytest

from genserve.client import AsyncClient
from genserve.errors import DeadlineError, PauseLeaseLostError, WeightVersionMismatchError
from tests.support.patience import SCALE, STEP_S, until
from tests.support.plain_vllm import PROMPTS
from tests.support.unchanging import unchanging

PAUSED_S = 3.0 * SCALE
LONG: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1900, "ignore_eos": True}


async def test_keep_freezes_streams_and_they_go_on_as_if_nothing_was(client: AsyncClient) -> None:
    """Not a token is lost or changed, and none arrives while paused."""
    tokens: list[int] = []
    async with client.stream(PROMPTS[0], **LONG) as stream:
        tokens += (await anext(stream)).outputs[0].token_ids
        async with client.paused(mode="keep"):
            late = asyncio.create_task(_collect(stream, tokens))
            frozen_at = await unchanging(lambda: len(tokens))
            assert frozen_at < LONG["max_tokens"]
            state = (await client.status()).state
            assert state.phase.lower() == "paused" and len(state.pauses) == 1
        await until(lambda: late.done() or len(tokens) >= frozen_at + 300)
        late.cancel()
        await asyncio.wait([late])
    assert len(tokens) > frozen_at
    whole = await client.generate(PROMPTS[0], **(LONG | {"max_tokens": len(tokens)}))
    assert tokens == whole.token_ids


async def _collect(stream: object, tokens: list[int]) -> None:
    async for delta in stream:  # type: ignore[attr-defined]
        tokens += delta.outputs[0].token_ids


async def test_abort_ends_streams_as_paused_and_keeps_their_tokens(client: AsyncClient) -> None:
    """Reason PAUSED tells them from those a client aborted."""
    async with client.stream(PROMPTS[0], **LONG) as stream:
        first = await anext(stream)
        async with client.paused(mode="abort"):
            rest = [delta async for delta in stream]
    finish = rest[-1].outputs[0].finish
    assert finish is not None and finish.reason == "paused"
    assert finish.num_tokens == sum(len(d.outputs[0].token_ids) for d in [first, *rest])


async def test_wait_lets_running_requests_finish_and_holds_back_new_ones(client: AsyncClient) -> None:
    """The pause answers when the engine is idle; a request that comes meanwhile runs after the resume."""
    tokens: list[int] = []
    stream = client.stream(PROMPTS[0], temperature=0.0, max_tokens=500, ignore_eos=True)
    tokens += (await anext(stream)).outputs[0].token_ids
    running = asyncio.create_task(_collect(stream, tokens))
    async with client.paused(mode="wait"):
        await asyncio.wait_for(running, 60)
        assert len(tokens) == 500
        held = asyncio.create_task(client.generate(PROMPTS[0], max_tokens=1))
        async with asyncio.timeout(STEP_S):
            while (load := (await client.status()).load).running + load.waiting == 0:
                await asyncio.sleep(0.01)
        assert not held.done()
    assert len((await asyncio.wait_for(held, 60)).token_ids) == 1


async def test_error_of_a_request_to_a_paused_engine_names_the_holder(client: AsyncClient) -> None:
    """A request that ran, and one that came later: before their own deadline. The engine has neither any more."""
    async with client.stream(PROMPTS[0], timeout_s=PAUSED_S, **LONG) as stream:
        await anext(stream)
        async with client.paused(holder="alice@host", ttl_s=600):
            late = client.generate(PROMPTS[0], max_tokens=1, timeout_s=PAUSED_S)
            for error in await asyncio.gather(late, _collect(stream, []), return_exceptions=True):
                assert isinstance(error, DeadlineError), error
                assert "paused by alice@host, " in error.message
                assert (error.metadata["phase"], error.metadata["holder"]) == ("PAUSED", "alice@host")
    async with asyncio.timeout(STEP_S):
        while (load := (await client.status()).load).running + load.waiting > 0:
            await asyncio.sleep(0.01)


async def test_wait_that_runs_out_of_time_leaves_the_engine_running(client: AsyncClient) -> None:
    """DEADLINE_EXCEEDED, no lease, and the stream goes on."""
    async with client.stream(PROMPTS[0], **LONG) as stream:
        await anext(stream)
        with pytest.raises(DeadlineError):
            await client.pause(mode="wait", timeout_s=0.3)
        assert (await client.status()).state.phase.lower() == "running"
        async with asyncio.timeout(60):
            await anext(stream)


async def test_a_lease_that_is_not_renewed_ends_by_itself(client: AsyncClient) -> None:
    """A trainer that dies never leaves the engine paused; a late resume is told that the lease had expired."""
    started = time.monotonic()
    lease = (await client.pause(ttl_s=0.5)).lease
    await asyncio.wait_for(client.generate(PROMPTS[0], max_tokens=1), 60)
    assert time.monotonic() - started > 0.4
    assert (await client.resume(lease.lease_id)).lease_expired
    with pytest.raises(PauseLeaseLostError):
        await client.renew_pause(lease.lease_id)


async def test_the_engine_runs_when_the_last_of_two_leases_ends(client: AsyncClient) -> None:
    """Two holders do not undo each other's pause."""
    one, two = (await client.pause()).lease, (await client.pause()).lease
    await client.resume(one.lease_id)
    assert (await client.status()).state.phase.lower() == "paused"
    await client.resume(two.lease_id)
    assert (await client.status()).state.phase.lower() == "running"


async def test_watch_tells_of_a_pause_at_once(client: AsyncClient) -> None:
    """The first status comes at once, the next ones on change."""
    async with client.watch_status() as statuses:
        assert (await anext(statuses)).state.phase.lower() == "running"
        lease = (await client.pause()).lease
        async with asyncio.timeout(60):
            async for status in statuses:
                if status.state.phase.lower() == "paused":
                    break
        await client.resume(lease.lease_id)


async def test_a_request_can_ask_for_a_minimum_weight_version(client: AsyncClient) -> None:
    """A rollout worker that needs fresh weights is refused by a server that lags behind."""
    served = (await client.get_weights()).weight_version
    with pytest.raises(WeightVersionMismatchError):
        await client.generate(PROMPTS[0], max_tokens=1, min_weight_version=served + 1)
    assert (await client.generate(PROMPTS[0], max_tokens=1, min_weight_version=served)).token_ids


async def test_the_server_tells_what_it_is(client: AsyncClient) -> None:
    """Limits and versions are those of the engine."""
    info = await client.server_info()
    assert info.limits.max_model_len == 2048
    assert info.architecture == "Qwen3ForCausalLM"
    assert {"genserve", "vllm", "torch"} <= set(info.versions)
