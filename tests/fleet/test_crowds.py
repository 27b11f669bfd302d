"""More calls at once than one connection takes, or than Python reads at once."""

import asyncio
from dataclasses import replace

import pytest

from genserve.v1 import generation_pb2
from tests.fleet.reports import time_passes
from tests.fleet.scripted_fleet import SETTINGS, ScriptedFleet, scripted_fleet
from tests.support.clocks import advanced_clock
from tests.support.patience import until

MAX_STREAMS = 4


async def test_requests_leave_room_for_what_the_router_asks_itself() -> None:
    """Others wait for a place on the connection of requests; the replica is watched, and asked to abort one of them."""
    settings = replace(SETTINGS, heartbeat_s=0.1)
    async with scripted_fleet(1, settings, max_streams=MAX_STREAMS) as router:
        calls = [
            router.generation.Generate(generation_pb2.GenerateRequest(request_id=str(each), text="x"), timeout=60)
            for each in range(2 * MAX_STREAMS)
        ]
        await until(lambda: router.inflight == [2 * MAX_STREAMS])
        request_id = (await router.daemons[0].stream(MAX_STREAMS - 2)).request_id
        aborting = generation_pb2.AbortRequest(request_ids=[request_id])
        assert list((await router.generation.Abort(aborting, timeout=20)).aborted_ids) == [request_id]
        with advanced_clock() as clock:
            for _ in range(3):
                await time_passes(clock, router.fleet, settings.silence_s)
        assert len(router.fleet.ready) == 1 and router.fleet.members[0].num_losses == 0
        for call in calls:
            call.cancel()


@pytest.mark.slow
async def test_calls_that_arrive_together_are_all_answered(router: ScriptedFleet) -> None:
    """gRPC would cancel some of them at random, and without a word, in the router and in its replicas."""

    async def ask() -> int:
        answer = await router.generation.Tokenize(generation_pb2.TokenizeRequest(text="x"), timeout=120)
        return len(answer.token_ids)

    assert await asyncio.gather(*(ask() for _ in range(2000))) == [2] * 2000
    assert all(member.num_losses == 0 for member in router.fleet.members)
