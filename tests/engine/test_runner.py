"""What may differ between vLLM's model runners: `scripts/test --runner-v2` runs this with V2, and all else with V1."""

from pathlib import Path

import pytest

from genserve.client import AsyncClient
from genserve.errors import InvalidFieldError
from tests.engine.outputs import GREEDY, wait_idle
from tests.support import on_runner_v2
from tests.support.plain_vllm import PROMPTS
from tests.support.reference import MAX_TOKENS


async def serves(client: AsyncClient) -> None:
    """The engine answers, and no request is left."""
    assert len((await client.generate(PROMPTS[0], **GREEDY)).token_ids) == MAX_TOKENS
    await wait_idle(client)


async def test_the_daemon_says_which_model_runner_its_workers_have(client: AsyncClient) -> None:
    """It is their own answer."""
    assert (await client.server_info()).model_runner == ("v2" if on_runner_v2.IS_ON else "v1")


def test_engines_schedule_a_step_ahead_where_they_have_the_runner_of_gpus(checkpoints: dict[str, Path]) -> None:
    """As on a GPU, so that a pause finds two steps in flight. On a CPU vLLM does not."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = AsyncEngineArgs(model=str(checkpoints["a"])).create_engine_config()
    assert config.scheduler_config.async_scheduling == on_runner_v2.IS_ON
    assert config.max_concurrent_batches == (2 if on_runner_v2.IS_ON else 1)


@pytest.mark.parametrize("min_tokens", [0, 2**31 - 1])
async def test_a_request_without_a_limit_worth_the_name_is_served(client: AsyncClient, min_tokens: int) -> None:
    """V2 would add the prompt's length to these in 32 bits, and end the engine."""
    async with client.stream(PROMPTS[0], max_tokens=2**31 - 1, min_tokens=min_tokens, ignore_eos=True) as stream:
        assert (await anext(stream)).outputs[0].token_ids
    await serves(client)


async def test_more_stop_tokens_than_v2_holds_are_refused_and_engine_lives(client: AsyncClient) -> None:
    """V1 has no limit."""
    options = {"max_tokens": 2, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [*range(200, 329)]}
    if on_runner_v2.IS_ON:
        with pytest.raises(InvalidFieldError) as caught:
            await client.generate(PROMPTS[0], **options)  # type: ignore[arg-type]
        assert [each.field for each in caught.value.violations] == ["stop.token_ids"]
        options["stop_token_ids"] = [*range(200, 320)]
    assert (await client.generate(PROMPTS[0], **options)).token_ids  # type: ignore[arg-type]
    await serves(client)


async def test_scores_of_chosen_tokens_of_a_prompt_are_refused(client: AsyncClient) -> None:
    """V2 computes them, and they would be lost on the way."""
    with pytest.raises(InvalidFieldError) as caught:
        await client.generate([1, 2, 3], max_tokens=1, engine_params={"prompt_logprob_token_ids": [[1], [2]]})
    assert [each.field for each in caught.value.violations] == ["engine_params.prompt_logprob_token_ids"]


async def test_a_greedy_token_is_the_first_of_its_step(learner_client: AsyncClient) -> None:
    """In float32: Triton's interpreter compares numbers of bf16 by their bits, and its ranks of those are wrong."""
    got = await learner_client.generate([1, 2, 3], temperature=0.0, max_tokens=8, logprobs=1, prompt_logprobs=1)
    for columns in (got.sequences[0].logprobs, got.prompt.logprobs if got.prompt is not None else None):
        assert columns is not None
        assert all(
            (rank == 1) == (columns.sampled[i] == columns.alternatives(i)[0][1]) for i, rank in enumerate(columns.ranks)
        )
    assert got.sequences[0].logprobs is not None and set(got.sequences[0].logprobs.ranks) == {1}
