"""Replicas that fall silent while requests run there: their connections stay, and nothing comes any more."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from genserve.engine.generation import FinishReason
from genserve.v1 import generation_pb2
from tests.fleet.reports import silence_passes
from tests.fleet.scripted_fleet import SETTINGS, ScriptedFleet, scripted_fleet, tokens
from tests.support.clocks import advanced_clock
from tests.support.patience import until


@pytest.fixture
async def router() -> AsyncIterator[ScriptedFleet]:
    """Its replicas say often that they are there."""
    async with scripted_fleet(settings=replace(SETTINGS, heartbeat_s=0.2)) as running:
        yield running


def asked(request_id: str) -> generation_pb2.GenerateRequest:
    """A request for tokens."""
    return generation_pb2.GenerateRequest(request_id=request_id, token_ids={"ids": [1, 2, 3]})


async def test_a_silent_replica_is_replaced(router: ScriptedFleet) -> None:
    """Its connection stays, and says nothing."""
    call = router.generation.Generate(asked("a"), timeout=60)
    first, lost = await router.running("a")
    with advanced_clock() as clock:
        router.links[first].silence()
        await silence_passes(clock, router.fleet, router.links[first].address)
        number, stream = await router.running("a", lost)
        assert number != first
        stream.put(tokens([7], prompt=3, finish=FinishReason.EOS))
        assert len([each async for each in call]) == 1


async def test_a_replica_that_is_silent_before_it_admits_is_replaced(router: ScriptedFleet) -> None:
    """No metadata come any more either."""
    for daemon in router.daemons:
        daemon.engine.admission.clear()
    call = router.generation.Generate(asked("a"), timeout=60)
    await until(lambda: sum(router.num_submitted) == 1)
    with advanced_clock() as clock:
        link = router.links[router.num_submitted.index(1)]
        link.silence()
        await silence_passes(clock, router.fleet, link.address)
        await until(lambda: sum(router.num_submitted) == 2)
        call.cancel()


async def test_a_silent_replica_loses_its_requests_to_the_others(router: ScriptedFleet) -> None:
    """Even if it has said nothing at all, and more is sent to it."""
    number = 0
    with advanced_clock() as clock:
        router.links[number].silence()
        call = router.generation.GenerateMany(timeout=60)
        for each in range(9):
            await call.write(generation_pb2.GenerateManyRequest(generate=asked(str(each))))
        await until(lambda: sum(router.inflight) == 9)
        assert router.inflight[number] > 0
        await silence_passes(clock, router.fleet, router.links[number].address)
        await until(lambda: sum(router.num_submitted) == 9)
        assert router.num_submitted[number] == 0
        call.cancel()
