"""Requests of which a part was delivered, and that cannot go on elsewhere at once, or not at all."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from genserve.engine.generation import FinishReason
from genserve.errors import ReplicaLostError, RequestIdInUseError, WeightVersionMismatchError
from genserve.forward.resume import seed_of_rest
from genserve.v1 import generation_pb2
from tests.fleet.direct_fleet import direct_fleet
from tests.fleet.scripted_fleet import SETTINGS, ScriptedFleet, scripted_fleet, tokens
from tests.fleet.talking_engine import let_talk
from tests.support.patience import STEP_S, until
from tests.support.pulled_peers import weights
from tests.support.scripted_daemon import ScriptedStream, detail_of

Request = generation_pb2.GenerateRequest
MANY = pytest.mark.parametrize("many", [False, True], ids=["Generate", "GenerateMany"])


class Asked:
    """A request with `resume`, in a call of Generate or in one of GenerateMany."""

    def __init__(self, router: ScriptedFleet, *, many: bool, **fields: Any) -> None:
        request = Request(request_id="a", resume=True, output={"text": False}, stop={"max_tokens": 9}, **fields)
        request.token_ids.ids.extend([1, 2, 3])
        self._many = many
        message = generation_pb2.GenerateManyRequest(generate=request)
        generation = router.generation
        self._call: Any = (
            generation.GenerateMany(iter([message]), timeout=25) if many else generation.Generate(request, timeout=25)
        )

    async def read(self) -> generation_pb2.GenerateResponse:
        """The next part of the answer."""
        response = await self._call.read()
        if not self._many:
            assert isinstance(response, generation_pb2.GenerateResponse)
            return response
        (item,) = response.items
        assert not item.HasField("error"), item.error.message
        return item.response

    async def lost(self) -> tuple[str, str, dict[str, str]]:
        """The error that follows: reason, message and metadata."""
        if self._many:
            error: status_pb2.Status = (await self._call.read()).items[0].error
            info = error_details_pb2.ErrorInfo()
            assert next(each for each in error.details if each.Is(info.DESCRIPTOR)).Unpack(info)
            return info.reason, error.message, dict(info.metadata)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self._call.read()
        info = detail_of(raised.value, error_details_pb2.ErrorInfo)
        return info.reason, raised.value.details() or "", dict(info.metadata)


async def begun(router: ScriptedFleet, asked: Asked, version: int = 0) -> tuple[int, ScriptedStream]:
    """Where a request runs of which one token was delivered, and the engine's side of it."""
    number, stream = await router.running("a")
    stream.put(tokens([5], prompt=3, version=version))
    await asked.read()
    return number, stream


async def commit(router: ScriptedFleet, version: int) -> None:
    """All replicas serve this version now, as after a push."""
    for daemon in router.daemons:
        daemon.engine.weight_version = version
    members = router.fleet.members
    await until(lambda: all(each.version is not None and each.version.number == version for each in members))
    router.fleet.commit(members[0].version)  # type: ignore[arg-type]
    await until(lambda: len(router.fleet.ready) == len(members))


@pytest.fixture
async def router() -> AsyncIterator[ScriptedFleet]:
    """At version 10. Requests wait very long for a replica."""
    async with scripted_fleet(3, replace(SETTINGS, wait_ready_s=300.0), versions=(10, 10, 10)) as running:
        yield running


@MANY
async def test_after_a_push_back_to_older_weights_it_is_lost_at_once(router: ScriptedFleet, many: bool) -> None:
    """It needs weights as new as those of its last token, and no replica is to blame for having older ones."""
    asked = Asked(router, many=many)
    number, _ = await begun(router, asked, version=10)
    await commit(router, 5)
    for daemon in router.daemons:
        let_talk(daemon.engine, 5)
    router.links[number].kill()
    reason, message, metadata = await asked.lost()
    assert reason == "REPLICA_LOST"
    assert metadata == {"replica": router.links[number].address, "num_tokens": "1"}
    assert "version 5 is served, the request needs 10" in message
    await until(lambda: len(router.fleet.ready) == 2)
    assert sum(router.num_submitted) == 1


async def test_direct_client_gets_the_retry_pushback_as_well() -> None:
    """At once, as by a router."""
    async with direct_fleet(2) as fleet, asyncio.timeout(STEP_S):
        await fleet.client.push_weights(weights(2), version=2)
        await fleet.client.wait_ready(STEP_S)
        stream = fleet.client.stream([1], request_id="a", resume=True, text=False, max_tokens=9)
        reading = asyncio.ensure_future(anext(stream))
        number, engine = await fleet.running("a")
        engine.put(tokens([5], prompt=1, version=2))
        await reading
        await fleet.client.push_weights(weights(1), version=1, force=True)
        await until(lambda: fleet.known.committed_version == 1)
        fleet.links[number].kill()
        with pytest.raises(ReplicaLostError, match="version 1 is served, the request needs 2") as raised:
            await anext(stream)
        assert raised.value.metadata == {"replica": fleet.links[number].address, "num_tokens": "1"}


@MANY
async def test_a_version_that_a_replica_has_first_is_waited_for(router: ScriptedFleet, many: bool) -> None:
    """Its tokens may come before the answer of its commit. The others are not to blame for having older weights."""
    asked = Asked(router, many=many)
    number, stream = await begun(router, asked, version=11)
    for daemon in router.daemons:
        daemon.engine.refusal = WeightVersionMismatchError("version 10 is served, the request needs 11")
    router.links[number].kill()
    await until(lambda: sum(router.num_submitted) >= 4)
    assert len(router.fleet.ready) == 2
    requests = [request for daemon in router.daemons for request in daemon.engine.requests]
    assert sorted(each.min_weight_version or 0 for each in requests) == [10, *[11] * (len(requests) - 1)]
    for daemon in router.daemons:
        daemon.engine.refusal = None
    _, again = await router.running("a", stream)
    again.put(tokens([6], prompt=4, version=11, finish=FinishReason.EOS))
    assert (await asked.read()).usage.num_output_tokens == 2


@MANY
async def test_an_id_that_somebody_else_uses_there_is_waited_for(router: ScriptedFleet, many: bool) -> None:
    """The request with it ends some time, and a part of this one is delivered."""
    asked = Asked(router, many=many)
    number, stream = await begun(router, asked, version=10)
    for daemon in router.daemons:
        daemon.engine.refusal = RequestIdInUseError.of("a")
    router.links[number].kill()
    await until(lambda: sum(router.num_submitted) >= 4)
    for daemon in router.daemons:
        daemon.engine.refusal = None
    _, again = await router.running("a", stream)
    again.put(tokens([6], prompt=4, version=10, finish=FinishReason.EOS))
    assert (await asked.read()).usage.num_output_tokens == 2


@MANY
async def test_what_refuses_the_rest_to_the_end_is_reported_with_the_loss(
    impatient_router: ScriptedFleet, many: bool
) -> None:
    """And how much was delivered."""
    router = impatient_router
    asked = Asked(router, many=many)
    number, _ = await begun(router, asked)
    for daemon in router.daemons:
        daemon.engine.refusal = RequestIdInUseError.of("a")
    router.links[number].kill()
    reason, message, metadata = await asked.lost()
    assert reason == "REPLICA_LOST"
    assert metadata == {"replica": router.links[number].address, "num_tokens": "1"}
    assert "'a' is already running" in message


@MANY
async def test_the_rest_is_not_drawn_with_the_random_numbers_of_the_beginning(
    router: ScriptedFleet, many: bool
) -> None:
    """Its seed follows from that of the request and from where it goes on."""
    asked = Asked(router, many=many, sampling={"seed": 7})
    number, stream = await begun(router, asked, version=10)
    router.links[number].kill()
    again, _ = await router.running("a", stream)
    seed = router.daemons[again].engine.requests[-1].sampling.seed
    assert seed == seed_of_rest(7, 1) != 7
    assert len({seed_of_rest(7, each) for each in range(1000)}) == 1000
    assert all(0 <= seed_of_rest(each, 1) < 1 << 63 for each in (-(1 << 63), -2, 0, (1 << 63) - 1))


@pytest.mark.parametrize("seed", [None, -1])
async def test_a_request_without_a_seed_goes_on_without_one(router: ScriptedFleet, seed: int | None) -> None:
    """For vLLM -1 is none: requests that are resumed at the same place must not all draw the same numbers."""
    asked = Asked(router, many=False, sampling={"seed": seed})
    number, stream = await begun(router, asked, version=10)
    router.links[number].kill()
    again, _ = await router.running("a", stream)
    assert router.daemons[again].engine.requests[-1].sampling.seed == seed
