"""Requests that go on elsewhere when their replica is lost."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from google.rpc import error_details_pb2

from genserve.engine.generation import FinishReason, TokenPrompt
from genserve.errors import InvalidFieldError, QueueFullError
from genserve.forward.resume import check_resume
from genserve.v1 import generation_pb2
from tests.fleet.scripted_fleet import ScriptedFleet, tokens
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, until
from tests.support.scripted_daemon import detail_of, field_of, reason_of

Request = generation_pb2.GenerateRequest
Response = generation_pb2.GenerateResponse
COLUMNS = generation_pb2.GENERATE_MANY_FORM_COLUMNS


def asked(request_id: str = "a", **fields: object) -> Request:
    """A request that may go on elsewhere."""
    message = Request(request_id=request_id, resume=True, output={"text": False, "logprobs": 0, "prompt_logprobs": 1})
    message.token_ids.ids.extend([1, 2, 3])
    message.MergeFrom(Request(**fields))
    return message


def spans(each: generation_pb2.SequenceDelta | generation_pb2.Finish) -> list[tuple[int, int, int]]:
    """Its versions."""
    return [(span.version, span.start, span.end) for span in each.weight_spans]


async def rest(call: "grpc.aio.UnaryStreamCall[Request, Response]") -> list[Response]:
    """What follows, to the end."""
    responses = []
    while isinstance(response := await call.read(), Response):
        responses.append(response)
    return responses


async def test_the_answer_is_as_if_nothing_had_happened(router: ScriptedFleet) -> None:
    """Positions, versions, sums and counts are those of the whole; the prompt is told once."""
    stop = generation_pb2.Stop(max_tokens=10, min_tokens=4)
    stop.time_budget.FromSeconds(100)
    call = router.generation.Generate(asked(stop=stop), timeout=20)
    number, stream = await router.running("a")
    stream.put(tokens([5, 6], prompt=3, with_logprobs=True))
    stream.put(tokens([7], 2, version=1, with_logprobs=True))
    first, second = await call.read(), await call.read()
    assert first.prompt.num_tokens == 3 and spans(second.outputs[0]) == [(1, 2, 3)]
    with advanced_clock() as clock:
        await clock.advance(20)
        router.links[number].kill()
        number, again = await router.running("a", stream)
    request = router.daemons[number].engine.requests[-1]
    assert request.prompt == TokenPrompt([1, 2, 3, 5, 6, 7])
    assert (request.stop.max_tokens, request.stop.min_tokens) == (7, 1)
    assert request.stop.time_budget_s is not None and 30 < request.stop.time_budget_s <= 80
    assert request.output.prompt_logprobs is None and request.output.logprobs == 0
    again.put(tokens([8], version=1, prompt=6, with_logprobs=True))
    again.put(tokens([9], 1, version=1, finish=FinishReason.EOS, num_prompt_tokens=6, with_logprobs=True))
    third, fourth = await rest(call)
    assert not third.HasField("prompt") and third.request_id == ""
    assert (list(third.outputs[0].token_ids), spans(third.outputs[0])) == ([8], [(1, 3, 4)])
    assert spans(fourth.outputs[0]) == [(1, 4, 5)]
    finish = fourth.outputs[0].finish
    assert (finish.num_tokens, spans(finish)) == (5, [(0, 0, 2), (1, 2, 5)])
    assert finish.cumulative_logprob == -(5 + 6 + 7) - 9  # of the scripted last part, only the last token is summed
    usage = fourth.usage
    assert (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens) == (3, 1, 5)


async def test_the_other_replica_may_have_another_version_of_the_adapter(router: ScriptedFleet) -> None:
    """The spans say where one ends and the other begins, though the weights are the same."""
    call = router.generation.Generate(asked(lora_name="poet"), timeout=20)
    number, stream = await router.running("a")
    stream.put(tokens([5, 6], prompt=3, lora_version=7))
    await call.read()
    router.links[number].kill()
    number, again = await router.running("a", stream)
    again.put(tokens([8], prompt=5, lora_version=7))
    again.put(tokens([9], 1, finish=FinishReason.EOS, lora_version=8))
    finish = (await rest(call))[-1].outputs[0].finish
    assert [(span.lora_version, span.start, span.end) for span in finish.weight_spans] == [(7, 0, 2), (8, 2, 4)]
    assert not finish.HasField("cumulative_logprob"), "nobody asked for it"


async def test_it_can_be_lost_twice(router: ScriptedFleet) -> None:
    """And waits for a replica as any other request does."""
    call = router.generation.Generate(asked(), timeout=20)
    stream = None
    for count in range(2):
        number, stream = await router.running("a", stream)
        stream.put(tokens([5 + count], prompt=3 + count))
        assert list((await call.read()).outputs[0].token_ids) == [5 + count]
        router.links[number].kill()
        router.daemons[number].engine.streams.clear()
    number, stream = await router.running("a", stream)
    assert router.daemons[number].engine.requests[-1].prompt == TokenPrompt([1, 2, 3, 5, 6])
    stream.put(tokens([7], prompt=5, finish=FinishReason.EOS, num_prompt_tokens=5))
    (last,) = await rest(call)
    assert last.outputs[0].finish.num_tokens == last.usage.num_output_tokens == 3
    assert spans(last.outputs[0].finish) == [(0, 0, 3)]


async def test_a_full_replica_is_asked_again_for_what_has_begun(router: ScriptedFleet) -> None:
    """Refusing would lose what was delivered."""
    call = router.generation.Generate(asked(), timeout=20)
    number, stream = await router.running("a")
    stream.put(tokens([5], prompt=3))
    await call.read()
    for daemon in router.daemons:
        daemon.engine.refusal = QueueFullError("full", retry_after_s=0.1)
    router.links[number].kill()
    await until(lambda: sum(router.num_submitted) >= 3)
    for daemon in router.daemons:
        daemon.engine.refusal = None
    number, stream = await router.running("a", stream)
    stream.put(tokens([6], prompt=4, finish=FinishReason.EOS))
    (last,) = await rest(call)
    assert last.outputs[0].finish.num_tokens == 2


async def test_an_answer_that_lacks_only_its_end_is_ended_by_the_router(router: ScriptedFleet) -> None:
    """All tokens that were asked for are there."""
    call = router.generation.Generate(asked(stop={"max_tokens": 2}), timeout=20)
    number, stream = await router.running("a")
    stream.put(tokens([5, 6], prompt=3, with_logprobs=True))
    await call.read()
    router.links[number].kill()
    (last,) = await rest(call)
    finish = last.outputs[0].finish
    assert (finish.reason, finish.num_tokens) == (generation_pb2.FINISH_REASON_LENGTH, 2)
    assert spans(finish) == [(0, 0, 2)] and finish.cumulative_logprob == -11
    assert (last.usage.num_prompt_tokens, last.usage.num_output_tokens) == (3, 2)
    assert sum(router.num_submitted) == 1


async def test_text_is_tokenized_when_it_has_to_be(router: ScriptedFleet) -> None:
    """As Generate does."""
    call = router.generation.Generate(
        Request(request_id="a", text="xy", resume=True, output={"text": False}), timeout=20
    )
    number, stream = await router.running("a")
    stream.put(tokens([5], prompt=3))
    await call.read()
    router.links[number].kill()
    number, stream = await router.running("a", stream)
    assert router.daemons[number].engine.requests[-1].prompt == TokenPrompt([0, 120, 121, 5])
    call.cancel()


@contextmanager
def slow_tokenizers(router: ScriptedFleet) -> Iterator[asyncio.Event]:
    """No replica answers Tokenize. Yields what is set when one is asked."""
    asked_for = asyncio.Event()

    async def never(*_: object) -> list[int]:
        asked_for.set()
        await asyncio.Event().wait()
        return []

    for daemon in router.daemons:
        daemon.engine.tokenize = never  # type: ignore[method-assign]
    yield asked_for


@pytest.mark.parametrize("everything", [False, True], ids=["by id", "all"])
@pytest.mark.parametrize("many", [False, True], ids=["Generate", "GenerateMany"])
async def test_an_abort_ends_a_request_whose_prompt_is_being_tokenized(
    router: ScriptedFleet, many: bool, everything: bool
) -> None:
    """It has lost its replica, and no other one has it: it ends as ABORTED with what was delivered."""
    request = Request(request_id="a", text="xy", resume=True, output={"text": False})
    call = router.generation.GenerateMany(timeout=20) if many else router.generation.Generate(request, timeout=20)
    if many:
        await call.write(generation_pb2.GenerateManyRequest(generate=request))  # type: ignore[union-attr]
    number, stream = await router.running("a")
    stream.put(tokens([5], prompt=3))
    await call.read()
    with slow_tokenizers(router) as asked_for:
        router.links[number].kill()
        await asyncio.wait_for(asked_for.wait(), STEP_S)
        abort = generation_pb2.AbortRequest(all=True) if everything else generation_pb2.AbortRequest(request_ids=["a"])
        assert list((await router.generation.Abort(abort, timeout=20)).aborted_ids) == ["a"]
        last = await call.read()
    response = last.items[0].response if many else last
    finish = response.outputs[0].finish
    assert (finish.reason, finish.num_tokens) == (generation_pb2.FINISH_REASON_ABORTED, 1)
    assert response.usage.num_output_tokens == 1
    call.cancel()


async def test_what_cannot_be_passed_on_ends_its_request_alone(router: ScriptedFleet) -> None:
    """A replica counts a token beyond what a number of the contract can have: INTERNAL for that one, which ends at the
    replica, too; others at the same replica go on."""
    await router.alone(0)
    call = router.generation.GenerateMany(timeout=20)
    for request_id in ("a", "b"):
        await call.write(generation_pb2.GenerateManyRequest(generate=asked(request_id)))
        (await router.running(request_id))[1].put(tokens([5], prompt=3))
        await call.read()
    streams = [(await router.running(request_id))[1] for request_id in ("a", "b")]
    router.links[0].cut()
    again = [(await router.running(name, before))[1] for name, before in zip("ab", streams, strict=True)]
    again[0].put(tokens([6], (1 << 32) - 2, prompt=4))
    (item,) = (await call.read()).items
    assert (item.request_id, item.error.code) == ("a", grpc.StatusCode.INTERNAL.value[0])
    await until(lambda: again[0].is_aborted)
    again[1].put(tokens([6], prompt=4, finish=FinishReason.EOS))
    (item,) = (await call.read()).items
    assert item.request_id == "b" and item.response.HasField("usage")
    call.cancel()


async def test_nobody_left_is_told_as_the_loss(impatient_router: ScriptedFleet) -> None:
    """After the time to wait for another one."""
    call = impatient_router.generation.Generate(asked(), timeout=20)
    _, stream = await impatient_router.running("a")
    stream.put(tokens([5], prompt=3))
    await call.read()
    for link in impatient_router.links:
        link.kill()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert reason_of(raised.value) == "REPLICA_LOST"
    assert detail_of(raised.value, error_details_pb2.ErrorInfo).metadata["num_tokens"] == "1"


async def test_many_requests_of_a_stream_are_resumed(router: ScriptedFleet) -> None:
    """As items, even for a client that asked for columns."""
    call = router.generation.GenerateMany(timeout=20)
    for request_id in ("a", "b", "c"):
        await call.write(generation_pb2.GenerateManyRequest(generate=asked(request_id), form=COLUMNS))
    victim, stream = await router.running("a")
    others = [(await router.running(request_id))[1] for request_id in ("b", "c")]
    stream.put(tokens([5], prompt=3))
    stream.put(tokens([6], 1))
    got = []
    while len(got) < 2:
        message = await call.read()
        assert not message.columns
        got += message.items
    router.links[victim].kill()
    number, again = await router.running("a", stream)
    assert router.daemons[number].engine.requests[-1].prompt == TokenPrompt([1, 2, 3, 5, 6])
    again.put(tokens([7], prompt=5, finish=FinishReason.EOS, num_prompt_tokens=5))
    (item,) = (await call.read()).items
    assert item.request_id == "a" and not item.response.HasField("prompt") and not item.slots
    finish = item.response.outputs[0].finish
    assert (finish.num_tokens, spans(finish)) == (3, [(0, 0, 3)])
    for other in others:
        other.put(tokens([9], prompt=3, finish=FinishReason.EOS))
        await call.read()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("sampling.n", {"sampling": {"n": 2}}),
        ("output.text", {"output": {"text": True}}),
        ("output.token_ids", {"output": {"token_ids": False}}),
        ("regex", {"regex": "a+"}),
        ("json_object", {"json_object": {}}),
        ("presence_penalty", {"sampling": {"presence_penalty": 0.5}}),
        ("frequency_penalty", {"sampling": {"frequency_penalty": -0.5}}),
        ("repetition_penalty", {"sampling": {"repetition_penalty": 1.1}}),
        ("bad_words", {"sampling": {"bad_words": ["x"]}}),
        ("stop.strings", {"stop": {"strings": ["x"]}}),
        ("engine_params", {"engine_params": {"thinking_token_budget": 3}}),
    ],
)
async def test_what_could_not_go_on_is_refused(router: ScriptedFleet, field: str, fields: dict[str, object]) -> None:
    """At once, naming the field."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await router.generation.Generate(asked(**fields), timeout=30).read()
    assert reason_of(raised.value) == "INVALID_FIELD" and field_of(raised.value) == "resume"
    assert field in str(raised.value.details())


def test_what_says_nothing_is_allowed() -> None:
    """Penalties that are none; and text has to be switched off by name."""
    check_resume(asked(sampling={"n": 1, "presence_penalty": 0.0, "repetition_penalty": 1.0, "seed": 3}))
    with pytest.raises(InvalidFieldError):
        check_resume(Request(resume=True))
