"""How many tokens were delivered of requests of a stream whose replica is lost."""

import asyncio

import pytest
from google.rpc import error_details_pb2

from genserve.client import AsyncClient
from genserve.engine.generation import FinishReason
from genserve.errors import ReplicaLostError
from genserve.v1 import generation_pb2
from tests.fleet.scripted_fleet import ScriptedFleet, tokens

Request = generation_pb2.GenerateManyRequest
FORMS = {"items": generation_pb2.GENERATE_MANY_FORM_ITEMS, "columns": generation_pb2.GENERATE_MANY_FORM_COLUMNS}


def counts(response: generation_pb2.GenerateManyResponse) -> dict[str, str]:
    """What the errors of a message say was delivered, by request."""
    told = {}
    for item in response.items:
        info = error_details_pb2.ErrorInfo()
        assert next(each for each in item.error.details if each.Is(info.DESCRIPTOR)).Unpack(info)
        assert info.reason == "REPLICA_LOST" and f"{info.metadata['num_tokens']} token" in item.error.message
        told[item.request_id] = info.metadata["num_tokens"]
    return told


@pytest.mark.parametrize("form", FORMS)
async def test_the_loss_says_how_many_tokens_each_request_had(router: ScriptedFleet, form: str) -> None:
    """Of all its sequences; a request that got the numbers of an earlier one begins at 0."""
    await router.alone(0)
    call = router.generation.GenerateMany(timeout=30)
    streams = {}
    for request_id, n in (("before", 1), ("two", 2), ("one", 1)):
        request = generation_pb2.GenerateRequest(request_id=request_id, token_ids={"ids": [1]}, sampling={"n": n})
        await call.write(Request(generate=request, form=FORMS[form]))
        _, streams[request_id] = await router.running(request_id)
        if request_id == "before":
            for update in (tokens([1], prompt=1), tokens([2, 3], 1), tokens([4], 3, finish=FinishReason.EOS)):
                streams["before"].put(update)
                await call.read()
    for request_id, update in (
        ("two", tokens([1], prompt=1)),
        ("one", tokens([1], prompt=1)),
        ("two", tokens([1, 2], index=1)),
        ("two", tokens([2], 1)),
        ("one", tokens([2, 3, 4], 1)),
        ("one", tokens([5], 4)),
    ):
        streams[request_id].put(update)
        response = await call.read()
        assert bool(response.columns) == (form == "columns" and not response.items)
    router.links[0].kill()
    assert counts(await call.read()) == {"two": "4", "one": "5"}


async def test_our_client_is_told_so(router: ScriptedFleet) -> None:
    """As for one request alone."""
    await router.alone(0)
    async with AsyncClient(router.address) as client, client.stream_many() as many:
        await many.submit([1], request_id="a", stream_interval=1, text=False)
        _, stream = await router.running("a")
        for update in (tokens([1], prompt=1), tokens([2, 3], 1)):
            stream.put(update)
            await anext(many)
        router.links[0].kill()
        async with asyncio.timeout(30):
            error = (await anext(many)).error
    assert isinstance(error, ReplicaLostError)
    assert error.metadata == {"replica": router.links[0].address, "num_tokens": "3"}
