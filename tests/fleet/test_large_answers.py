"""Answers that are too large for one message, through a router."""

import asyncio

import pytest

from genserve.client.generation.results import Delta, Generation
from genserve.v1 import generation_pb2
from tests.fleet.scripted_fleet import ScriptedFleet
from tests.support.large_answers import COLUMNS, NUM_TOKENS, begun, check, gain, large, read_all


@pytest.mark.slow
async def test_large_answers_come_through_a_router(router: ScriptedFleet) -> None:
    """Of which a client knows no more than of a daemon."""
    await router.alone(0)
    call = router.generation.GenerateMany(timeout=30)
    await begun(call, COLUMNS)
    reading = asyncio.create_task(read_all(call))
    await gain([(await router.running(request_id))[1] for request_id in ("large", "small")])
    generations, _ = await reading
    check(generations["large"], 2 * NUM_TOKENS)
    assert generations["small"].token_ids == [7]

    request = generation_pb2.GenerateRequest(request_id="alone", token_ids={"ids": [1, 2]})
    single = router.generation.Generate(request, timeout=30)
    (await router.running("alone"))[1].put(large())
    generation = Generation()
    async for response in single:
        generation.add(Delta(response))
    check(generation)
