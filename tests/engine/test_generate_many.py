"""GenerateMany against real vLLM."""

import asyncio
from pathlib import Path

import pytest

from genserve.client import AsyncClient, Generation
from genserve.errors import PromptTooLongError, QueueFullError
from tests.engine.outputs import ends_early
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.plain_vllm import PROMPTS
from tests.support.reference import MAX_TOKENS

GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
NUM_REQUESTS = 48


def content(generation: Generation) -> list[tuple[object, ...]]:
    """All that a generation says of its tokens."""
    return [
        (s.index, s.text, s.token_ids, s.weight_spans, s.finish_reason, s.logprobs and len(s.logprobs.token_ids))
        for s in generation.sequences
    ]


async def test_many_give_what_each_alone_gives(client: AsyncClient) -> None:
    """Tokens, text, log-probabilities, spans, finish, prompt, usage: token by token."""
    options = {**GREEDY, "logprobs": 2, "prompt_logprobs": 1, "stream_interval": 1, "cache_salt": "many"}
    alone = [await client.generate(prompt, **options) for prompt in PROMPTS]  # type: ignore[arg-type]
    many = await client.generate_many(PROMPTS, **{**options, "cache_salt": "others"})  # type: ignore[arg-type]
    for one, other in zip(alone, many, strict=True):
        assert content(one) == content(other)
        for alike, another in zip(one.sequences, other.sequences, strict=True):
            # By value: of two alternatives that are about as likely, a batch may put another one first.
            assert alike.logprobs is not None and another.logprobs is not None
            assert alike.logprobs.values == pytest.approx(another.logprobs.values, abs=1e-1)
        assert one.prompt is not None and other.prompt is not None
        assert one.prompt.logprobs is not None and other.prompt.logprobs is not None
        assert one.prompt.logprobs.sampled == pytest.approx(other.prompt.logprobs.sampled, abs=1e-1)
        assert one.usage is not None and one.usage == other.usage
    sampled = await client.generate_many(PROMPTS, n=3, seed=5, max_tokens=4, ignore_eos=True)
    assert [[len(s.token_ids) for s in generation.sequences] for generation in sampled] == [[4, 4, 4]] * len(PROMPTS)


async def test_a_step_of_the_engine_is_one_message(client: AsyncClient) -> None:
    """Far fewer messages than tokens: the point of the method."""
    num_messages = num_items = 0
    async with client.stream_many() as many:
        for number in range(NUM_REQUESTS):
            # Some of them may come together on a busy machine.
            await many.submit([number + 1, 7], stream_interval=1, **(GREEDY | {"max_tokens": 4 * MAX_TOKENS}))
        await many.done()
        before = -1
        async for _ in many:
            num_items += 1
            num_messages += many.num_messages != before
            before = many.num_messages
    assert num_items >= NUM_REQUESTS * MAX_TOKENS // 2
    assert num_messages < num_items / 8


async def test_a_prompt_that_is_too_long_is_its_own_error(client: AsyncClient) -> None:
    """The others are generated."""
    prompts = [PROMPTS[0], [1] * 100_000, PROMPTS[1]]
    first, second, third = await client.generate_many(prompts, raise_errors=False, **GREEDY)
    assert isinstance(second.error, PromptTooLongError) and second.token_ids == []
    assert (len(first.token_ids), len(third.token_ids)) == (MAX_TOKENS, MAX_TOKENS)


async def test_one_is_aborted_and_the_others_run_to_their_end(client: AsyncClient) -> None:
    """It finishes as aborted and keeps its tokens."""
    async with client.stream_many() as many:
        long = await many.submit([5, 6], max_tokens=1900, ignore_eos=True)
        await many.submit([5, 7], request_id="short", **GREEDY)
        await many.done()
        generations = {long: Generation(), "short": Generation()}
        is_aborted = False
        async for item in many:
            assert item.delta is not None
            generations[item.request_id].add(item.delta)
            if item.request_id == long and len(generations[long].token_ids) >= 8 and not is_aborted:
                is_aborted = True
                await many.abort(long)
    aborted = generations[long].sequences[0]
    assert aborted.finish_reason == "aborted" and 8 <= len(aborted.token_ids) < 1900
    assert len(generations["short"].token_ids) == MAX_TOKENS


async def test_a_client_that_goes_away_leaves_no_request_behind(client: AsyncClient) -> None:
    """They end long before their last token."""
    task = asyncio.create_task(client.generate_many([[n + 1] for n in range(16)], max_tokens=1900, ignore_eos=True))
    async with asyncio.timeout(60):
        while (await client.status()).load.running < 16:
            await asyncio.sleep(0.01)
    async with ends_early(client):
        task.cancel()


async def test_more_prompts_than_the_daemon_takes_are_all_generated(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Two clients share a queue of 8: a ninth sequence is refused, and sent again by a client that generates many, so
    that each gets every answer."""
    flags = ["--model", str(checkpoints["a"]), *SMALL_ENGINE, "--max-active-requests", "8"]
    process = DaemonProcess(flags, tmp_path / "stderr")
    try:
        address = (await asyncio.to_thread(process.wait_serving)).address
        prompts = [[number + 1, 7] for number in range(200)]
        async with AsyncClient(address) as one, AsyncClient(address) as other:
            async with one.stream_many() as many:
                for n in (5, 3, 1):
                    await many.submit([1, 7], n=n, max_tokens=2000, ignore_eos=True)
                async for item in many:
                    if item.is_last:
                        break
                assert isinstance(item.error, QueueFullError), "the ninth, while eight run"
            for generations in await asyncio.gather(
                *(each.generate_many(prompts, max_tokens=2, ignore_eos=True) for each in (one, other))
            ):
                assert [len(generation.token_ids) for generation in generations] == [2] * 200
    finally:
        process.end()
