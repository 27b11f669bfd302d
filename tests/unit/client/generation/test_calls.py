"""Generation through a real server: sums of deltas, cancellation, deadlines, metadata."""

import asyncio

import pytest

from genserve.client import AsyncClient, Timeouts, WeightSpan
from genserve.errors import DeadlineError, InvalidFieldError
from genserve.v1 import generation_pb2
from tests.support.patience import STEP_S
from tests.support.refusals import refuses
from tests.support.scripted_services import ScriptedDaemon, running_daemon


async def test_generate_sums_the_deltas(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """Text, tokens and log-probabilities are joined, weight spans cover the sequence, the ends carry the counts."""
    generation = await client.generate("x", max_tokens=4, logprobs=1)
    (sequence,) = generation.sequences
    assert generation.text == "Once upon a time"
    assert sequence.token_ids == [0, 1, 2, 3]
    assert sequence.logprobs is not None
    assert sequence.logprobs.sampled == [-0.5] * 4
    assert sequence.logprobs.alternatives(3) == [(7, -0.5)]
    assert sequence.weight_spans == [WeightSpan(0, 0, 2), WeightSpan(1, 2, 4)]
    assert sequence.finish_reason == "length"
    assert generation.request_id == "minted"
    assert generation.prompt is not None
    assert generation.prompt.num_tokens == 3
    assert generation.usage is not None
    assert generation.usage.num_output_tokens == 4


async def test_generate_asks_for_one_message_and_stream_for_many(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """A collected result needs no message per token; who streams gets the daemon's default."""
    await client.generate("x")
    async for _ in client.stream("x"):
        pass
    await client.generate("x", stream_interval=2)
    whole, streamed, asked = daemon.requests
    assert whole.output.HasField("stream_interval")
    assert whole.output.stream_interval == 0
    assert not streamed.HasField("output")
    assert asked.output.stream_interval == 2


async def test_adjacent_spans_of_one_version_are_joined_before_the_finish(daemon: ScriptedDaemon) -> None:
    """An unfinished sequence has as few spans as its versions allow."""
    from genserve.client import Generation

    daemon.hangs_after = 3
    generation = Generation()
    async with AsyncClient(daemon.target) as client, client.stream("x") as deltas:
        for _ in range(3):
            generation.add(await anext(deltas))
    assert generation.sequences[0].weight_spans == [WeightSpan(0, 0, 2), WeightSpan(1, 2, 3)]


async def test_leaving_a_stream_cancels_the_request(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """`async with` around a stream ends the RPC when it is left early; the stream is then at its end."""
    daemon.hangs_after = 1
    async with client.stream("x") as deltas:
        assert (await anext(deltas)).text == "Once"
        await asyncio.wait_for(daemon.hanging.wait(), STEP_S)
    await asyncio.wait_for(daemon.cancelled.wait(), STEP_S)
    assert [delta async for delta in deltas] == []


async def test_cancelling_a_task_cancels_the_request_and_stays_a_cancellation(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """asyncio's cancellation is not turned into another error."""
    daemon.hangs_after = 0
    task = asyncio.create_task(client.generate("x"))
    await asyncio.wait_for(daemon.hanging.wait(), STEP_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(daemon.cancelled.wait(), STEP_S)


async def test_every_call_has_a_deadline_unless_none_is_asked_for(daemon: ScriptedDaemon) -> None:
    """The default is that of Timeouts, None has to be written."""
    async with AsyncClient(daemon.target, timeouts=Timeouts(generate_s=50, control_s=40)) as client:
        await client.generate("x")
        assert daemon.remaining_s == pytest.approx(50, abs=5)
        await client.generate("x", timeout_s=20)
        assert daemon.remaining_s == pytest.approx(20, abs=5)
        await client.generate("x", timeout_s=None)
        assert daemon.remaining_s is None
        await client.status()
        assert daemon.remaining_s == pytest.approx(40, abs=5)
        await client.pause(timeout_s=100)
        assert daemon.remaining_s == pytest.approx(110, abs=5)


async def test_a_passed_deadline_is_a_deadline_error(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """gRPC's own DEADLINE_EXCEEDED has no reason of ours and is typed all the same."""
    daemon.hangs_after = 1
    with pytest.raises(DeadlineError):
        await client.generate("x", timeout_s=0.2)


async def test_token_and_metadata_are_sent_with_every_call(daemon: ScriptedDaemon) -> None:
    """As gRPC metadata; keys in lower case, as HTTP/2 wants them."""
    async with AsyncClient(daemon.target, token="secret", metadata={"X-Run": "7"}) as client:
        await client.status()
    assert daemon.metadata["authorization"] == "Bearer secret"
    assert daemon.metadata["x-run"] == "7"


async def test_unix_sockets_are_targets(tmp_path: object) -> None:
    """unix:/path works as an address."""
    async with running_daemon(f"unix:{tmp_path}/s") as daemon, AsyncClient(daemon.target) as client:
        assert (await client.generate("x")).text == "Once upon a time"


async def test_tokenizer_and_abort(client: AsyncClient) -> None:
    """Plain calls answer plain values."""
    assert await client.tokenize("a bb ccc") == [1, 2, 3]
    assert await client.detokenize([1, 2]) == "1 2"
    aborted = await client.abort(["a", "b"])
    assert (aborted.aborted_ids, aborted.unknown_ids) == (["a"], ["b"])


async def test_text_and_chats_are_tokenized_as_they_would_be_generated_from(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """With or without special tokens, if the caller says so; token ids are tokens already."""
    await client.tokenize("a bb", add_special_tokens=False)
    await client.tokenize([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    text, chat = daemon.tokenized
    assert text == generation_pb2.TokenizeRequest(text="a bb", add_special_tokens=False)
    assert [(message.role, message.content) for message in chat.chat.messages] == [("user", "hi")]
    assert chat.chat.add_generation_prompt is False and not chat.HasField("add_special_tokens")
    with refuses(InvalidFieldError, field="prompt"):
        await client.tokenize([1, 2])  # type: ignore[arg-type]
