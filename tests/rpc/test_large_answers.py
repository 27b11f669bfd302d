"""Answers that are too large for one message, as a client takes them whose channel has gRPC's default of 4 MiB."""

import asyncio

import pytest

from genserve.client.generation.results import Delta, Generation
from genserve.engine.generation import LogprobColumns, PromptInfo
from genserve.v1 import generation_pb2
from tests.support.large_answers import COLUMNS, ITEMS, NUM_TOKENS, begun, check, gain, large, read_all
from tests.support.scripted_daemon import Daemon, update


async def test_generate_answers_in_messages_that_any_client_takes(daemon: Daemon) -> None:
    """The usage is on the last one."""
    call = daemon.generation.Generate(generation_pb2.GenerateRequest(text="hi"), timeout=30)
    (await daemon.stream()).put(large())
    generation, usages = Generation(), []
    async for response in call:
        generation.add(Delta(response))
        usages.append(response.HasField("usage"))
    check(generation)
    assert len(usages) > 2 and usages == [False] * (len(usages) - 1) + [True]


@pytest.mark.slow
async def test_logprobs_of_a_long_prompt_come_in_messages_of_accepted_size(daemon: Daemon) -> None:
    """A context of 32k tokens with 20 alternatives each is 4.6 MB."""
    call = daemon.generation.Generate(generation_pb2.GenerateRequest(text="hi"), timeout=30)
    length, width = 32_768, 20
    ids = list(range(length))
    entries = range((length - 1) * width)
    rows = LogprobColumns([-1.0] * (length - 1), ids[1:], width, list(entries), [-float(i) for i in entries])
    only = update(7, last=True)
    only.prompt = PromptInfo(length, 16, ids, rows)
    (await daemon.stream()).put(only)
    generation = Generation()
    async for response in call:
        generation.add(Delta(response))
    prompt = generation.prompt
    assert prompt is not None and (prompt.num_tokens, prompt.num_cached_tokens) == (length, 16)
    assert prompt.token_ids == ids and prompt.logprobs is not None and prompt.logprobs.ranks == ids[1:]
    assert prompt.logprobs.values == [-float(i) for i in entries] and prompt.logprobs.token_ids == list(entries)
    assert generation.token_ids == [7] and generation.usage is not None


@pytest.mark.slow
@pytest.mark.parametrize("form", [ITEMS, COLUMNS])
async def test_a_large_answer_in_a_stream_ends_neither_itself_nor_others(
    daemon: Daemon, form: "generation_pb2.GenerateManyForm.ValueType"
) -> None:
    """In either form; the small one does not wait for all of the large one."""
    call = daemon.generation.GenerateMany(timeout=30)
    await begun(call, form)
    reading = asyncio.create_task(read_all(call))
    await gain([await daemon.stream(0), await daemon.stream(1)])
    generations, ended = await reading
    check(generations["large"], 2 * NUM_TOKENS)
    assert generations["small"].token_ids == [7]
    assert ended == ["small", "large"]
