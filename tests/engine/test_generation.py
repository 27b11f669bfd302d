"""Generation through gRPC against real vLLM."""

import json
import re
from collections.abc import Callable

import pytest

from genserve.client import AsyncClient
from genserve.errors import InvalidFieldError, LoraNotFoundError, PromptTooLongError, RequestIdInUseError
from tests.engine.outputs import GREEDY, ends_early, wait_idle
from tests.support.daemon_process import DaemonProcess
from tests.support.plain_vllm import PROMPTS, Reference
from tests.support.reference import MAX_TOKENS, NUM_LOGPROBS


async def test_greedy_tokens_text_and_logprobs_equal_those_of_vllm_in_process(
    client: AsyncClient, reference: Callable[..., Reference]
) -> None:
    """Nothing on the way through gRPC changes a token, a character or a bit of a log-probability."""
    for prompt, expected in zip(PROMPTS, reference("a")["outputs"], strict=True):
        got = await client.generate(
            prompt, logprobs=NUM_LOGPROBS, prompt_logprobs=NUM_LOGPROBS, stream_interval=1, **GREEDY
        )
        sequence = got.sequences[0]
        assert sequence.token_ids == expected["token_ids"]
        assert sequence.text == expected["text"]
        assert sequence.logprobs is not None
        assert sequence.logprobs.sampled == pytest.approx(expected["sampled"], abs=1e-6)
        assert sequence.logprobs.width == NUM_LOGPROBS
        for position, row in enumerate(expected["alternatives"]):
            assert [t for t, _ in sequence.logprobs.alternatives(position)] == [t for t, _ in row]
            assert [v for _, v in sequence.logprobs.alternatives(position)] == pytest.approx(
                [v for _, v in row], abs=1e-6
            )
        assert got.prompt is not None and got.prompt.logprobs is not None
        assert got.prompt.logprobs.sampled == pytest.approx(expected["prompt_sampled"], abs=1e-6)
        assert len(got.prompt.logprobs.sampled) == got.prompt.num_tokens - 1


async def test_streamed_deltas_add_up_to_the_final_message(client: AsyncClient) -> None:
    """Deltas are strict: every token and character comes once, whatever the interval."""
    whole = await client.generate(PROMPTS[0], stream_interval=0, **GREEDY)
    for interval in (1, 5):
        parts = await client.generate(PROMPTS[0], stream_interval=interval, **GREEDY)
        assert parts.token_ids == whole.token_ids
        assert parts.text == whole.text
    assert whole.usage is not None and whole.usage.num_output_tokens == MAX_TOKENS


async def test_several_sequences_of_a_prompt_are_told_apart_by_index(client: AsyncClient) -> None:
    """n = 4 gives four sequences with own tokens, finishes and spans."""
    got = await client.generate(
        PROMPTS[0], n=4, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True, stream_interval=1
    )
    assert [len(s.token_ids) for s in got.sequences] == [8, 8, 8, 8]
    assert len({tuple(s.token_ids) for s in got.sequences}) > 1
    assert all(s.finish is not None and s.finish.reason == "length" for s in got.sequences)
    assert all(s.weight_spans[0].start == 0 and s.weight_spans[-1].end == 8 for s in got.sequences)


async def test_a_seed_makes_sampling_repeat_and_another_one_does_not(client: AsyncClient) -> None:
    """Sampling fields reach the engine."""
    options = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    first, again, other = [(await client.generate(PROMPTS[0], seed=s, **options)).token_ids for s in (1, 1, 2)]
    assert first == again != other


async def test_top_p_of_zero_is_refused_and_does_not_become_the_default(client: AsyncClient) -> None:
    """A zero that was sent is a value, not an absence."""
    with pytest.raises(InvalidFieldError) as raised:
        await client.generate(PROMPTS[0], top_p=0.0, max_tokens=1)
    assert [v.field for v in raised.value.violations] == ["sampling.top_p"]


async def test_logit_bias_allowed_tokens_and_bad_words_steer_the_output(client: AsyncClient) -> None:
    """The fields that restrict the vocabulary reach the engine."""
    biased = await client.generate(PROMPTS[0], temperature=0.0, max_tokens=3, logit_bias={42: 100.0}, ignore_eos=True)
    assert biased.token_ids == [42, 42, 42]
    allowed = await client.generate(
        PROMPTS[0], temperature=1.0, max_tokens=8, allowed_token_ids=[3, 4], ignore_eos=True
    )
    assert set(allowed.token_ids) <= {3, 4}


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": "[0-9]{3}-[0-9]{2}"}, r"\d{3}-\d{2}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'root ::= "ab" | "cd"'}, "ab|cd"),
        ({"json_schema": {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
                          "required": ["n"], "additionalProperties": False}}, r'\{\s*"n"\s*:\s*\d\s*\}'),
    ],
)  # fmt: skip
async def test_a_constraint_holds(client: AsyncClient, options: dict[str, object], pattern: str) -> None:
    """Every kind of structured output binds what a random model says."""
    # A random model would fill a JSON text with white space, of which the grammar allows any amount.
    blank = dict.fromkeys(await client.tokenize(" \n\r\t"), -100.0)
    got = await client.generate("x", temperature=1.0, seed=3, max_tokens=64, logit_bias=blank, **options)
    assert re.fullmatch(pattern, got.text), got.text


async def test_json_object_starts_an_object(client: AsyncClient) -> None:
    """A random model never finishes its JSON; what there is must be the beginning of an object."""
    got = await client.generate("x", temperature=1.0, seed=3, max_tokens=48, json_object=True)
    assert got.text.lstrip().startswith("{")
    if got.sequences[0].finish_reason == "eos":
        json.loads(got.text)


async def test_a_stop_token_and_a_stop_string_are_named_in_the_finish(
    client: AsyncClient, reference: Callable[..., Reference]
) -> None:
    """The reason says what stopped it."""
    tokens = reference("a")["outputs"][0]["token_ids"]
    stopped = await client.generate(PROMPTS[0], stop_token_ids=[tokens[5]], **GREEDY)
    finish = stopped.sequences[0].finish
    assert finish is not None
    assert (finish.reason, finish.stop_token_id) == ("stop_token", tokens[5])
    constrained = await client.generate("x", regex="aaaa-bbbb", stop=["-b"], max_tokens=32)
    assert constrained.text == "aaaa"
    assert constrained.sequences[0].finish is not None
    assert (constrained.sequences[0].finish.reason, constrained.sequences[0].finish.stop_string) == (
        "stop_string",
        "-b",
    )
    kept = await client.generate("x", regex="aaaa-bbbb", stop=["-b"], include_stop=True, max_tokens=32)
    assert kept.text == "aaaa-b"


async def test_a_time_budget_keeps_what_was_produced(client: AsyncClient) -> None:
    """The request ends by itself with reason TIME_LIMIT and its tokens."""
    got = await client.generate(PROMPTS[0], temperature=0.0, max_tokens=1900, ignore_eos=True, time_budget_s=1.0)
    assert got.sequences[0].finish_reason == "time_limit"
    assert 0 < len(got.token_ids) < 1900


async def test_a_chat_is_rendered_with_the_models_template(client: AsyncClient) -> None:
    """Chat, text of the rendered chat and its token ids are one prompt."""
    messages = [{"role": "user", "content": "hi"}]
    ids = await client.tokenize(messages)
    chat = await client.generate(messages, prompt_token_ids=True, **GREEDY)
    assert chat.prompt is not None
    assert chat.prompt.token_ids == ids
    assert (await client.generate(ids, **GREEDY)).token_ids == chat.token_ids
    assert "hi" in await client.detokenize(ids)


async def test_repeated_prompt_hits_the_prefix_cache_unless_the_salt_differs(client: AsyncClient) -> None:
    """Cached tokens are counted, and a salt separates caches."""
    prompt = [i % 500 for i in range(7, 300)]
    await client.generate(prompt, max_tokens=1)
    again = await client.generate(prompt, max_tokens=1)
    salted = await client.generate(prompt, max_tokens=1, cache_salt="other")
    assert again.usage is not None and salted.usage is not None
    assert again.usage.num_cached_tokens > 0
    assert salted.usage.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "stop.max_tokens"),
        ({"temperature": -0.5}, "sampling.temperature"),
        ({"n": 0}, "sampling.n"),
        ({"bad_words": ["a", ""]}, "sampling.bad_words"),
        ({"bad_words": ["a", " "]}, "sampling.bad_words"),  # vLLM finds no token in it
        ({"engine_params": {"tempreature": 1}}, "engine_params.tempreature"),
        ({"engine_params": {"temperature": 1}}, "engine_params.temperature"),
        ({"logprobs": 100000}, "output.logprobs"),
        ({"data_parallel_rank": 3}, "data_parallel_rank"),
        ({"json_schema": "{not json"}, "constraint"),
    ],
)
async def test_a_bad_field_is_named_and_the_next_request_works(
    client: AsyncClient, options: dict[str, object], field: str
) -> None:
    """INVALID_ARGUMENT with the path of the field in the message."""
    with pytest.raises(InvalidFieldError) as raised:
        await client.generate(PROMPTS[0], **{"max_tokens": 4, **options})
    assert [v.field for v in raised.value.violations] == [field], raised.value
    assert len((await client.generate(PROMPTS[0], **GREEDY)).token_ids) == MAX_TOKENS


async def test_an_engine_parameter_without_a_field_of_its_own_is_passed_on(client: AsyncClient) -> None:
    """engine_params reach SamplingParams."""
    params = {"repetition_detection": {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 3}}
    got = await client.generate(
        PROMPTS[0], temperature=0.0, max_tokens=16, logit_bias={42: 100.0}, ignore_eos=True, engine_params=params
    )
    assert got.sequences[0].finish_reason == "repetition"


async def test_a_prompt_that_fills_the_context_is_refused(client: AsyncClient) -> None:
    """PROMPT_TOO_LONG tells both lengths."""
    with pytest.raises(PromptTooLongError) as raised:
        await client.generate([1] * 2048, max_tokens=1)
    assert raised.value.metadata == {"num_tokens": "2048", "max_model_len": "2048"}


async def test_no_prompt_is_refused(client: AsyncClient) -> None:
    """A request needs a prompt."""
    with pytest.raises(InvalidFieldError) as raised:
        await client.generate([], max_tokens=1)
    assert "token_ids" in raised.value.violations[0].field or "prompt" in raised.value.violations[0].field


async def test_an_adapter_that_is_not_loaded_is_not_found(client: AsyncClient) -> None:
    """LORA_NOT_FOUND."""
    with pytest.raises(LoraNotFoundError):
        await client.generate(PROMPTS[0], lora_name="nobody", max_tokens=1)


async def test_a_request_id_that_runs_cannot_be_used_again(client: AsyncClient) -> None:
    """ALREADY_EXISTS while the first runs, and free afterwards."""
    async with client.stream(PROMPTS[0], request_id="mine", max_tokens=1900, ignore_eos=True) as running:
        await anext(running)
        with pytest.raises(RequestIdInUseError):
            await client.generate(PROMPTS[0], request_id="mine", max_tokens=1)
    await wait_idle(client)
    assert (await client.generate(PROMPTS[0], request_id="mine", max_tokens=1)).request_id == "mine"


async def test_a_disconnected_clients_request_is_gone_at_once(client: AsyncClient, daemon: DaemonProcess) -> None:
    """Closing the connection frees the engine; another request shows that it would have run on."""
    await wait_idle(client)
    other = AsyncClient(daemon.address)
    stream = other.stream(PROMPTS[0], max_tokens=1900, ignore_eos=True)
    await anext(stream)
    async with ends_early(client):
        assert (await client.status()).load.running == 2
        await other.close()


async def test_abort_ends_a_stream_and_keeps_its_tokens(client: AsyncClient) -> None:
    """Ids that did not run are told apart."""
    async with client.stream(PROMPTS[0], request_id="victim", max_tokens=1900, ignore_eos=True) as stream:
        first = await anext(stream)
        result = await client.abort(["victim", "nobody"])
        rest = [delta async for delta in stream]
    assert (result.aborted_ids, result.unknown_ids) == (["victim"], ["nobody"])
    finish = rest[-1].outputs[0].finish
    assert finish is not None and finish.reason == "aborted"
    assert finish.num_tokens == sum(len(d.outputs[0].token_ids) for d in [first, *rest])
