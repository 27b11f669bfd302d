"""Ids of requests, as clients in any language send them."""

import grpc
import grpc.aio

from genserve.v1 import generation_pb2, types_pb2
from genserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.fleet.routers import routed
from tests.support.patience import until


async def test_an_id_that_runs_in_a_call_is_refused_there() -> None:
    """As by a daemon: the second request has failed, the first one goes on."""
    prompt = types_pb2.TokenIds(ids=[1])
    request = generation_pb2.GenerateManyRequest(
        generate=generation_pb2.GenerateRequest(request_id="a", token_ids=prompt)
    )
    async with routed(1) as fleet, grpc.aio.insecure_channel(fleet.running.address) as channel:
        call = GenerationServiceStub(channel).GenerateMany(timeout=30)
        await call.write(request)
        engine = fleet.daemons[0].engine
        await until(lambda: engine.streams)
        await call.write(request)
        (item,) = (await call.read()).items
        assert (item.request_id, item.error.code) == ("a", grpc.StatusCode.ALREADY_EXISTS.value[0])
        assert len(engine.requests) == 1 and not engine.streams[0].closed.is_set()
        call.cancel()
