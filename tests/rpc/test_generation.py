"""Generate, as a client on the wire sees it."""

import asyncio
import json
import logging

import grpc
import pytest

from genserve.control.conditions import Phase
from genserve.errors import EngineDeadError, GenserveError, QueueFullError
from genserve.v1 import control_pb2, generation_pb2
from genserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.support.patience import STEP_S, until
from tests.support.phases import enter_phase
from tests.support.scripted_daemon import Daemon, field_of, reason_of, update

PROMPT = generation_pb2.GenerateRequest(text="hi")
RETRY_POLICY = {
    "maxAttempts": 5,
    "initialBackoff": "0.05s",
    "maxBackoff": "0.05s",
    "backoffMultiplier": 1,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
RETRIES = [("grpc.service_config", json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": RETRY_POLICY}]}))]


async def refused(daemon: Daemon, request: generation_pb2.GenerateRequest) -> grpc.aio.AioRpcError:
    """The error with which a request ends before anything was streamed."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.generation.Generate(request, timeout=30).read()
    return caught.value


async def test_updates_are_streamed_as_they_come(daemon: Daemon) -> None:
    """One message per update, at once; the id on the first, the usage on the last, then OK."""
    call = daemon.generation.Generate(generation_pb2.GenerateRequest(text="hi", request_id="r1"), timeout=30)
    stream = await daemon.stream()
    stream.put(update(7, first=True))
    first = await call.read()
    assert (first.request_id, list(first.outputs[0].token_ids), first.HasField("usage")) == ("r1", [7], False)
    stream.put(update(8, last=True))
    last = await call.read()
    assert (last.request_id, list(last.outputs[0].token_ids), last.HasField("usage")) == ("", [8], True)
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    assert stream.closed.is_set()


async def test_a_request_without_an_id_gets_one_of_its_own(daemon: Daemon) -> None:
    """It is told with the first message, so that the request can be aborted."""
    calls = [daemon.generation.Generate(PROMPT, timeout=30) for _ in range(2)]
    ids = set()
    for index in range(2):
        (await daemon.stream(index)).put(update(1, first=True))
    for call in calls:
        ids.add((await call.read()).request_id)
    assert len(ids) == 2 and all(len(each) >= 16 for each in ids)
    assert ids == {request.request_id for request in daemon.engine.requests}


async def test_zero_arrives_as_zero(daemon: Daemon) -> None:
    """Through real serialisation, not only in the converter."""
    sampling = generation_pb2.Sampling(top_p=0.0, seed=0)
    daemon.generation.Generate(generation_pb2.GenerateRequest(text="hi", sampling=sampling), timeout=30)
    await daemon.stream()
    arrived = daemon.engine.requests[0].sampling
    assert (arrived.top_p, arrived.seed, arrived.temperature) == (0.0, 0, None)


async def test_initial_metadata_comes_with_the_admission_and_not_before(daemon: Daemon) -> None:
    """While a request is being admitted a client may still retry it; afterwards it must not, tokens or not."""
    daemon.engine.admission.clear()
    call = daemon.generation.Generate(PROMPT, timeout=30)
    await daemon.engine.submitted.wait()
    metadata = asyncio.create_task(call.initial_metadata())
    await daemon.control.GetStatus(control_pb2.GetStatusRequest())  # answered on the same connection
    assert not metadata.done()
    daemon.engine.admission.set()
    await asyncio.wait_for(metadata, STEP_S)
    assert daemon.engine.streams and not daemon.engine.streams[0].closed.is_set()


async def test_a_refused_request_is_trailers_only_and_so_retried(daemon: Daemon) -> None:
    """gRPC's own retries replay a call only while no initial metadata has come: here they do, and succeed."""
    daemon.engine.refusal = EngineDeadError("not yet")
    async with grpc.aio.insecure_channel(daemon.address, options=RETRIES) as channel:
        call = GenerationServiceStub(channel).Generate(PROMPT, timeout=30)
        await daemon.engine.submitted.wait()
        daemon.engine.refusal = None
        (await daemon.stream()).put(update(3, first=True))
        assert list((await call.read()).outputs[0].token_ids) == [3]
        assert len(daemon.engine.requests) >= 2, "nothing was retried: the control does not hold"


async def test_a_generation_that_has_begun_is_never_replayed(daemon: Daemon) -> None:
    """The same retry policy, and the same code, after the admission: one request, and the error is the client's."""
    async with grpc.aio.insecure_channel(daemon.address, options=RETRIES) as channel:
        call = GenerationServiceStub(channel).Generate(PROMPT, timeout=30)
        await asyncio.wait_for(call.initial_metadata(), STEP_S)
        (await daemon.stream()).put(EngineDeadError("gone"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert reason_of(caught.value) == "ENGINE_DEAD"
    assert len(daemon.engine.requests) == 1


async def test_cancelling_while_waiting_for_a_token_ends_the_request(daemon: Daemon) -> None:
    """Although the engine has nothing to say."""
    call = daemon.generation.Generate(PROMPT)
    stream = await daemon.stream()
    assert not stream.closed.is_set()
    call.cancel()
    await until(stream.closed.is_set)


async def test_a_client_that_vanishes_while_being_written_to_ends_the_request(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """The write that blocks on a full stream is cancelled: the request leaves the engine, and no error is logged."""
    with caplog.at_level(logging.WARNING):
        call = daemon.generation.Generate(PROMPT)
        stream = await daemon.stream()
        large = update(1)
        large.outputs[0].text = "x" * 100_000
        for _ in range(300):
            stream.put(large)
        await call.read()
        async with asyncio.timeout(STEP_S):
            before = -1
            while stream.updates.qsize() != before:  # until the writer is stuck
                before = stream.updates.qsize()
                await asyncio.sleep(0.2)
        assert before > 0, "the stream took everything: the control does not hold"
        call.cancel()
        await until(stream.closed.is_set)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_deadline_ends_the_request(daemon: Daemon) -> None:
    """The client has given up, so nobody wants the tokens."""
    for timeout_s in (0.3, 5.0, 25.0):  # a busy machine may take longer to bring it there
        call = daemon.generation.Generate(PROMPT, timeout=timeout_s)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if daemon.engine.streams:
            break
    # The call may end before it waits for the first token.
    await until(daemon.engine.streams[0].closed.is_set)


async def test_a_refusal_has_its_code_reason_and_delay(daemon: Daemon) -> None:
    """What the engine raises is what a client can decode."""
    daemon.engine.refusal = QueueFullError("full", retry_after_s=1.0)
    error = await refused(daemon, PROMPT)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")


async def test_a_bad_request_names_its_field_and_never_reaches_the_engine(daemon: Daemon) -> None:
    """INVALID_ARGUMENT with a field path."""
    error = await refused(daemon, generation_pb2.GenerateRequest(text="x", sampling=generation_pb2.Sampling(n=0)))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert field_of(error) == "sampling.n"
    assert daemon.engine.requests == []


async def test_an_error_in_the_middle_closes_the_request(daemon: Daemon) -> None:
    """The stream ends with the error after what was produced."""
    call = daemon.generation.Generate(PROMPT, timeout=30)
    stream = await daemon.stream()
    stream.put(update(1, first=True))
    stream.put(GenserveError("odd"))
    assert (await call.read()).outputs
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert (caught.value.code(), reason_of(caught.value)) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert stream.closed.is_set()


async def test_an_unforeseen_error_tells_an_id_only(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    """The log has the traceback under it."""
    daemon.engine.refusal = KeyError("secret")
    error = await refused(daemon, PROMPT)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(error.details())
    (record,) = [record for record in caplog.records if record.name == "genserve.rpc.status"]
    assert record.getMessage().split()[2] in str(error.details())


@pytest.mark.parametrize(
    ("phase", "code", "reason"),
    [
        (Phase.DRAINING, grpc.StatusCode.UNAVAILABLE, "DRAINING"),
        (Phase.DEAD, grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD"),
        (Phase.TAINTED, grpc.StatusCode.FAILED_PRECONDITION, "ENGINE_TAINTED"),
        (Phase.SLEEPING, grpc.StatusCode.FAILED_PRECONDITION, "ENGINE_SLEEPING"),
    ],
)
async def test_a_phase_that_takes_no_requests_refuses_them(
    daemon: Daemon, phase: Phase, code: grpc.StatusCode, reason: str
) -> None:
    """Before the engine is asked; requests that run are left alone."""
    running = daemon.generation.Generate(PROMPT, timeout=30)
    stream = await daemon.stream()
    enter_phase(daemon.board, phase)
    error = await refused(daemon, PROMPT)
    assert (error.code(), reason_of(error)) == (code, reason)
    assert len(daemon.engine.requests) == 1
    stream.put(update(1, first=True))
    assert (await running.read()).outputs


async def test_a_paused_engine_takes_requests(daemon: Daemon) -> None:
    """They wait for the resume."""
    enter_phase(daemon.board, Phase.PAUSED)
    daemon.generation.Generate(PROMPT, timeout=30)
    await daemon.stream()


async def test_abort_tells_what_ran_and_what_did_not(daemon: Daemon) -> None:
    """All needs no ids."""
    daemon.generation.Generate(generation_pb2.GenerateRequest(text="x", request_id="r1"), timeout=30)
    await daemon.stream()
    response = await daemon.generation.Abort(generation_pb2.AbortRequest(request_ids=["r1", "r2"]))
    assert (list(response.aborted_ids), list(response.unknown_ids)) == (["r1"], ["r2"])
    assert response.state.instance_id == "test"
    assert list((await daemon.generation.Abort(generation_pb2.AbortRequest(all=True))).aborted_ids) == ["r1"]
    assert not (await daemon.generation.Abort(generation_pb2.AbortRequest())).aborted_ids


async def test_the_tokenizer_answers_both_ways(daemon: Daemon) -> None:
    """Special tokens are added unless said otherwise, and kept unless said otherwise."""
    response = await daemon.generation.Tokenize(generation_pb2.TokenizeRequest(text="a"))
    assert (list(response.token_ids), response.max_model_len) == ([0, 97], 64)
    plain = generation_pb2.TokenizeRequest(text="a", add_special_tokens=False)
    assert list((await daemon.generation.Tokenize(plain)).token_ids) == [97]
    request = generation_pb2.DetokenizeRequest(token_ids=[0, 97])
    assert (await daemon.generation.Detokenize(request)).text == "\0a"
    request.skip_special_tokens = True
    assert (await daemon.generation.Detokenize(request)).text == "a"


async def test_a_message_above_the_limit_is_refused(daemon: Daemon) -> None:
    """RESOURCE_EXHAUSTED, and the next request is served."""
    error = await refused(daemon, generation_pb2.GenerateRequest(text="x" * (2 << 20)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    daemon.generation.Generate(PROMPT, timeout=30)
    await daemon.stream()
