"""Links between a router and a replica, or a client and the router, over which nothing arrives in one direction or in
both: what is noticed, where requests go, and that everything is as before when the link is whole again."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc.aio
import pytest

from genserve.client import AsyncClient
from genserve.errors import DeadlineError
from genserve.v1 import generation_pb2
from tests.fleet.reports import silence_passes
from tests.fleet.routers import QUICK, over, replica
from tests.fleet.scripted_fleet import SETTINGS as SCRIPTED
from tests.fleet.scripted_fleet import scripted_fleet, tokens
from tests.support.clocks import advanced_clock
from tests.support.fault_proxy import BOTH, FaultProxy, Way
from tests.support.patience import STEP_S, until
from tests.support.pulled_peers import content, weights
from tests.support.scripted_daemon import reason_of

SETTINGS = replace(SCRIPTED, heartbeat_s=0.1)
WAYS = pytest.mark.parametrize("ways", [(Way.TO_SERVER,), (Way.TO_CLIENT,), BOTH], ids=["requests", "answers", "both"])


@pytest.mark.slow
@WAYS
async def test_unreachable_replica_gets_no_requests_until_it_is_reachable(ways: tuple[Way, ...]) -> None:
    """The router has a deadline of its own. The replica fetches what was pushed meanwhile before it serves."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        link = await stack.enter_async_context(FaultProxy(daemons[0].address))
        async with over([], QUICK) as fleet:
            router = fleet.running.router
            router.add(link.address)
            router.add(daemons[1].address)
            await fleet.until_ready(2)
            with advanced_clock() as clock:
                link.black_hole(*ways)
                await silence_passes(clock, router.fleet, link.address)
                assert [each.address for each in router.fleet.ready] == [daemons[1].address]
                reason = router.fleet.where(router.find(link.address).member)[1]
                # Without answers a report is as late as the answer of a call, and whichever ends first is told.
                assert ("not answered a call for 60 s" in reason) or ("60 s" in reason and Way.TO_CLIENT in ways)
                await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
                link.heal()
                await fleet.until_ready(2)
                assert daemons[0].engine.live == content(1)


@WAYS
async def test_a_request_behind_a_black_hole_is_answered_by_another_replica(ways: tuple[Way, ...]) -> None:
    """It has delivered nothing. The next requests do not try the lost replica at all."""
    async with scripted_fleet(2, SETTINGS) as router:
        with advanced_clock() as clock:
            with router.busy(1):
                router.links[0].black_hole(*ways)
                call = router.generation.Generate(generation_pb2.GenerateRequest(request_id="a", text="hi"), timeout=60)
                await until(lambda: router.inflight[0] == 1)
                await silence_passes(clock, router.fleet, router.links[0].address)
            stream = await router.daemons[1].stream()
            stream.put(tokens([5], prompt=3))
            response = await call.read()
            assert response.outputs[0].token_ids == [5]
            call.cancel()
            await until(lambda: len(router.fleet.ready) == 1)
            router.links[0].heal()
            await until(lambda: len(router.fleet.ready) == 2)


@WAYS
async def test_a_stream_behind_a_black_hole_ends_with_the_replica_named(ways: tuple[Way, ...]) -> None:
    """It has delivered tokens, so it is not begun again. The replica ends the request when it is reached again."""
    async with scripted_fleet(2, SETTINGS) as router:
        with advanced_clock() as clock:
            call = router.generation.Generate(generation_pb2.GenerateRequest(request_id="a", text="hi"), timeout=60)
            number, stream = await router.running("a")
            stream.put(tokens([5], prompt=3))
            await call.read()
            router.links[number].black_hole(*ways)
            await silence_passes(clock, router.fleet, router.links[number].address)
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await call.read()
            assert reason_of(lost.value) == "REPLICA_LOST"
            assert router.links[number].address in (lost.value.details() or "")
            router.links[number].heal()
            await until(stream.closed.is_set)


@WAYS
async def test_calls_of_a_client_behind_a_black_hole_end_at_their_deadlines(ways: tuple[Way, ...]) -> None:
    """And the same client goes on when its link is whole."""
    async with over([]) as fleet, FaultProxy(fleet.running.address) as link, AsyncClient(link.address) as client:
        await client.status()
        link.black_hole(*ways)
        calls = {
            "status": client.status(timeout_s=0.5),
            "replicas": client.list_replicas(timeout_s=0.5),
            "weights": client.get_weights(timeout_s=0.5),
            "generate": client.generate([1], timeout_s=0.5),
            "push": client.push_weights(weights(1), version=1, timeout_s=0.5),
        }
        async with asyncio.timeout(STEP_S):
            answers = await asyncio.gather(*calls.values(), return_exceptions=True)
        named = dict(zip(calls, answers, strict=True))
        assert all(isinstance(each, DeadlineError) for each in answers), named
        link.heal()
        assert (await client.status()).state.weight_version == 0
