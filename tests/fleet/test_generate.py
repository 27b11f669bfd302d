"""Generate through a router, as a client on the wire sees it."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2

from genserve.client import AsyncClient
from genserve.engine.generation import FinishReason, TokenPrompt
from genserve.errors import (
    DrainingError,
    InvalidFieldError,
    QueueFullError,
    ReplicaLostError,
    UnsupportedError,
    WeightVersionMismatchError,
)
from genserve.forward.attempts import MAX_LOST
from genserve.v1 import generation_pb2
from tests.fleet.scripted_fleet import ScriptedFleet, scripted_fleet, tokens
from tests.support.patience import STEP_S, turns, until
from tests.support.scripted_daemon import detail_of, field_of, reason_of

Request = generation_pb2.GenerateRequest


class FutureError(UnsupportedError):
    """With a reason that nobody knows here."""

    reason = "FROM_THE_FUTURE"


def asked(request_id: str = "a", **fields: object) -> Request:
    """A request for tokens."""
    return Request(request_id=request_id, token_ids={"ids": [1, 2, 3]}, **fields)


async def test_an_answer_comes_as_the_replica_gave_it(router: ScriptedFleet) -> None:
    """And the request reaches the replica as it was sent, fields unknown to this version included."""
    unknown = Request.FromString(asked().SerializeToString() + b"\xba\x3e\x03abc")
    call = router.generation.Generate(unknown, timeout=20)
    number, stream = await router.running("a")
    stream.put(tokens([7], prompt=3))
    stream.put(tokens([8], 1, finish=FinishReason.EOS))
    answers = [each async for each in call]
    assert [list(each.outputs[0].token_ids) for each in answers] == [[7], [8]]
    assert answers[0].request_id == "a" and answers[0].prompt.num_tokens == 3
    assert answers[1].usage.num_output_tokens == 2
    (request,) = router.daemons[number].engine.requests
    assert request.prompt == TokenPrompt([1, 2, 3])
    assert sum(router.num_submitted) == 1


async def test_initial_metadata_come_with_the_admission_and_name_no_ports(router: ScriptedFleet) -> None:
    """A client may try again until then."""
    for daemon in router.daemons:
        daemon.engine.admission.clear()
    call = router.generation.Generate(asked(), timeout=20)
    waiting = asyncio.ensure_future(call.initial_metadata())
    await until(lambda: sum(router.num_submitted) == 1)
    await router.generation.Tokenize(generation_pb2.TokenizeRequest(text="ab"), timeout=30)  # on the same connections
    assert not waiting.done()
    for daemon in router.daemons:
        daemon.engine.admission.set()
    assert tuple(await waiting) == ()
    assert not call.done()
    call.cancel()


async def test_requests_spread_over_the_replicas(router: ScriptedFleet) -> None:
    """By the policy, which counts those that run."""
    calls = [router.generation.Generate(asked(str(number)), timeout=20) for number in range(6)]
    await until(lambda: sum(router.num_submitted) == 6)
    assert router.num_submitted == [2, 2, 2]
    for call in calls:
        call.cancel()
    await until(lambda: all(member.inflight == 0 for member in router.fleet.members))


async def test_a_full_replica_is_not_the_end(router: ScriptedFleet) -> None:
    """Nor is one that shuts down."""
    router.daemons[0].engine.refusal = QueueFullError("full", retry_after_s=1.5)
    router.daemons[1].engine.refusal = DrainingError("it shuts down")
    with router.busy(2):
        call = router.generation.Generate(asked(), timeout=20)
        number, stream = await router.running("a")
    assert number == 2
    assert router.num_submitted == [1, 1, 1], "it was not tried where it is refused"
    stream.put(tokens([7], prompt=3, finish=FinishReason.EOS))
    assert len([each async for each in call]) == 1


async def test_full_everywhere_is_answered_as_the_replicas_do(router: ScriptedFleet) -> None:
    """With the delay after which to try again."""
    for daemon in router.daemons:
        daemon.engine.refusal = QueueFullError("full", retry_after_s=1.5)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await router.generation.Generate(asked(), timeout=20).read()
    assert reason_of(raised.value) == "QUEUE_FULL"
    assert router.num_submitted == [1, 1, 1]


async def test_other_errors_pass_unchanged_and_are_not_tried_again(router: ScriptedFleet) -> None:
    """With their violations."""
    for daemon in router.daemons:
        daemon.engine.refusal = InvalidFieldError.of("sampling.top_p", "is wrong")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await router.generation.Generate(asked(), timeout=20).read()
    assert (reason_of(raised.value), field_of(raised.value)) == ("INVALID_FIELD", "sampling.top_p")
    assert sum(router.num_submitted) == 1


async def test_an_error_that_this_version_does_not_know_passes_as_it_is(router: ScriptedFleet) -> None:
    """Code, text and details: those of the replica itself."""
    told = []
    for daemon in router.daemons:
        daemon.engine.refusal = FutureError("of a newer daemon", metadata={"when": "later"})
    for stub in (router.generation, router.daemons[0].generation):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(asked(), timeout=20).read()
        error = raised.value
        told.append((error.code(), error.details(), dict(error.trailing_metadata())["grpc-status-details-bin"]))
    assert told[0] == told[1] and b"FROM_THE_FUTURE" in told[0][2]


async def test_a_replica_that_is_lost_before_the_first_message_is_replaced(router: ScriptedFleet) -> None:
    """The request has the same id there, although the client gave none."""
    call = router.generation.Generate(asked(""), timeout=20)
    await until(lambda: sum(router.num_submitted) == 1)
    first = router.num_submitted.index(1)
    request_id = router.daemons[first].engine.requests[0].request_id
    router.links[first].kill()
    number, stream = await router.running(request_id, router.daemons[first].engine.streams[0])
    assert number != first
    stream.put(tokens([7], prompt=3, finish=FinishReason.EOS))
    (answer,) = [each async for each in call]
    assert answer.request_id == request_id


async def test_after_the_first_message_the_loss_is_reported(router: ScriptedFleet) -> None:
    """With the replica, and how much was delivered."""
    call = router.generation.Generate(asked(sampling={"n": 2}), timeout=20)
    first, stream = await router.running("a")
    stream.put(tokens([7, 8], prompt=3))
    stream.put(tokens([9], index=1))
    await call.read()
    await call.read()
    router.links[first].kill()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(raised.value) == "REPLICA_LOST"
    info = detail_of(raised.value, error_details_pb2.ErrorInfo)
    assert dict(info.metadata) == {"replica": router.links[first].address, "num_tokens": "3"}
    assert sum(router.num_submitted) == 1


async def lose_those_that_have_it(router: ScriptedFleet) -> None:
    """A replica dies as soon as it is given a request, until the router gives it to nobody else."""
    for count in range(1, MAX_LOST + 1):
        await until(lambda count=count: sum(router.num_submitted) == count)
        for link, submitted in zip(router.links, router.num_submitted, strict=True):
            if submitted:
                link.kill()


async def test_a_request_that_takes_replicas_with_it_is_not_given_to_all() -> None:
    """It may be why they die."""
    async with scripted_fleet(MAX_LOST + 1) as router:
        call = router.generation.Generate(asked(), timeout=20)
        await lose_those_that_have_it(router)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert reason_of(raised.value) == "REPLICA_LOST"
        assert sum(router.num_submitted) == MAX_LOST


async def test_a_client_does_not_give_it_to_the_others() -> None:
    """gRPC would make a call again that was not admitted by any of them."""
    async with scripted_fleet(MAX_LOST + 1) as router, AsyncClient(router.address) as client:
        for daemon in router.daemons:
            daemon.engine.admission.clear()
        generating = asyncio.create_task(client.generate([1], max_tokens=1, text=False, timeout_s=20))
        await lose_those_that_have_it(router)
        with pytest.raises(ReplicaLostError):
            await generating
        assert sum(router.num_submitted) == MAX_LOST
        for daemon in router.daemons:
            daemon.engine.admission.set()


async def test_a_cancelled_call_ends_upstream(router: ScriptedFleet) -> None:
    """At once."""
    call = router.generation.Generate(asked(), timeout=20)
    _, stream = await router.running("a")
    call.cancel()
    await until(stream.closed.is_set)


async def test_the_deadline_goes_on_to_the_replica(router: ScriptedFleet) -> None:
    """What is left of it."""
    for timeout_s in (1.0, 5.0, 25.0):  # a busy machine may take longer to bring it there
        call = router.generation.Generate(asked(), timeout=timeout_s)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if streams := [stream for daemon in router.daemons for stream in daemon.engine.streams]:
            break
    await until(streams[0].closed.is_set)


async def test_a_version_that_nobody_has_is_refused_as_a_daemon_does(patient_router: ScriptedFleet) -> None:
    """At once, and not after the time to wait for a replica."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await patient_router.generation.Generate(asked(min_weight_version=9), timeout=30).read()
    assert reason_of(raised.value) == "WEIGHT_VERSION_MISMATCH"
    assert patient_router.num_submitted == [0, 0, 0]


async def test_a_replica_behind_the_fleet_is_passed_over(router: ScriptedFleet) -> None:
    """The router had not heard yet."""
    router.daemons[0].engine.refusal = WeightVersionMismatchError("version 0 is served, the request needs 0")
    router.daemons[1].engine.refusal = WeightVersionMismatchError("version 0 is served, the request needs 0")
    with router.busy(2):
        call = router.generation.Generate(asked(min_weight_version=0), timeout=20)
        number, _ = await router.running("a")
    assert number == 2
    assert router.num_submitted == [1, 1, 1], "it was not tried where it is refused"
    call.cancel()


async def test_a_request_waits_for_a_replica_and_can_be_aborted(router: ScriptedFleet) -> None:
    """None is ready. It ends as an aborted one does in a daemon."""
    for link in router.links:
        link.kill()
    await until(lambda: not router.fleet.ready)
    call = router.generation.Generate(asked(), timeout=20)
    reading = asyncio.ensure_future(call.read())
    aborting = generation_pb2.AbortRequest(request_ids=["a", "b"])
    async with asyncio.timeout(STEP_S):
        while not (answer := await router.generation.Abort(aborting, timeout=30)).aborted_ids:
            await turns()  # the router has not read the request yet
    assert (list(answer.aborted_ids), list(answer.unknown_ids)) == (["a"], ["b"])
    last = await reading
    assert last.outputs[0].finish.reason == generation_pb2.FINISH_REASON_ABORTED and last.HasField("usage")


async def test_nobody_there_is_told_after_the_wait(impatient_router: ScriptedFleet) -> None:
    """With what the replicas do instead."""
    for link in impatient_router.links:
        link.kill()
    await until(lambda: not impatient_router.fleet.ready)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await impatient_router.generation.Generate(asked(), timeout=20).read()
    assert reason_of(raised.value) == "NO_REPLICA"
    assert "3 unhealthy" in str(raised.value.details())


async def test_what_is_no_request_is_refused(router: ScriptedFleet) -> None:
    """Bytes that are no message, and a session that is none."""
    raw = router.channel.unary_stream("/genserve.v1.GenerationService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await raw(b"\xff\xff\xff", timeout=30).read()
    assert reason_of(raised.value) == "INVALID_FIELD"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await router.generation.Generate(asked(session_id="x" * 257), timeout=30).read()
    assert field_of(raised.value) == "session_id"


async def test_abort_reaches_every_replica(router: ScriptedFleet) -> None:
    """What runs on any of them is aborted; unknown is what runs on none."""
    calls = [router.generation.Generate(asked(str(number)), timeout=20) for number in range(3)]
    for number in range(3):
        await router.running(str(number))
    answer = await router.generation.Abort(generation_pb2.AbortRequest(request_ids=["0", "1", "2", "x"]), timeout=30)
    assert sorted(answer.aborted_ids) == ["0", "1", "2"] and list(answer.unknown_ids) == ["x"]
    assert answer.state.instance_id.startswith("instance-")
    for call in calls:
        call.cancel()


async def test_any_replica_tokenizes(router: ScriptedFleet) -> None:
    """Another one if that is lost."""
    await router.alone(1)
    for _ in range(2):
        answer = await router.generation.Tokenize(generation_pb2.TokenizeRequest(text="ab"), timeout=30)
        assert list(answer.token_ids) == [0, 97, 98]
        text = await router.generation.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[97, 98]), timeout=30)
        assert text.text == "ab"


async def test_a_replica_that_shuts_down_ends_what_it_runs(router: ScriptedFleet) -> None:
    """Its watch ends with its last request, whose end may be on its way still."""
    call = router.generation.Generate(asked(), timeout=20)
    number, stream = await router.running("a")
    stream.put(tokens([7], prompt=3))
    await call.read()
    router.daemons[number].board.end()
    await until(lambda: len(router.fleet.ready) == 2)
    stream.put(tokens([8], 1, finish=FinishReason.EOS))
    assert (await call.read()).HasField("usage")


async def test_a_request_waits_while_replicas_start_again(router: ScriptedFleet) -> None:
    """All of them shut down: the first one that is back takes it."""
    for daemon in router.daemons:
        daemon.engine.refusal = DrainingError("it shuts down")
    call = router.generation.Generate(asked(), timeout=20)
    await until(lambda: min(router.num_submitted) >= 2)
    router.daemons[1].engine.refusal = None
    number, stream = await router.running("a")
    assert number == 1
    stream.put(tokens([7], prompt=3, finish=FinishReason.EOS))
    assert (await call.read()).HasField("usage")


async def test_a_connection_that_breaks_is_used_again() -> None:
    """By the same replica, where there is no other."""
    async with scripted_fleet(1) as router:
        call = router.generation.Generate(asked(), timeout=20)
        _, lost = await router.running("a")
        router.links[0].cut()
        _, stream = await router.running("a", lost)
        stream.put(tokens([7], prompt=3, finish=FinishReason.EOS))
        assert (await call.read()).HasField("usage")


async def test_a_session_stays_with_its_replica() -> None:
    """Whatever else runs there."""
    async with scripted_fleet(policies="session,requests") as router:
        calls = [router.generation.Generate(asked(str(each), session_id="s"), timeout=20) for each in range(4)]
        numbers = {(await router.running(str(each)))[0] for each in range(4)}
        assert len(numbers) == 1
        for call in calls:
            call.cancel()


async def test_an_adapter_that_nobody_knows_is_for_a_replica_to_refuse(patient_router: ScriptedFleet) -> None:
    """At once: it may just have been loaded, or not exist."""
    for upstream in patient_router.fleet.ready:
        upstream.member.has_loras(())
    call = patient_router.generation.Generate(asked(lora_name="new"), timeout=30)
    _, stream = await patient_router.running("a")
    assert stream.request_id == "a"
    call.cancel()
