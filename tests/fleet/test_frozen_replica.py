"""Calls of GenerateMany through a router while one replica takes nothing, and is not known to be lost yet."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from genserve.forward import leg
from genserve.v1 import generation_pb2
from tests.fleet.scripted_fleet import ScriptedFleet, scripted_fleet
from tests.support.patience import STEP_S, turns, until

Request = generation_pb2.GenerateManyRequest
LARGE = [99_999] * 100_000  # three bytes each: a few of them fill what HTTP/2 lets through
MAX_UNSENT_BYTES = 1 << 20


def asked(request_id: str, ids: Sequence[int] = (1, 2, 3)) -> Request:
    """A request for tokens."""
    return Request(generate=generation_pb2.GenerateRequest(request_id=request_id, token_ids={"ids": ids}))


@pytest.fixture
async def router() -> AsyncIterator[ScriptedFleet]:
    """Before replicas that take long prompts, the first of which has stopped."""
    async with scripted_fleet() as running:
        freeze(running)
        yield running


def freeze(router: ScriptedFleet) -> None:
    """Nothing goes to the first replica or comes from it, and nobody is told."""
    for daemon in router.daemons:
        daemon.engine.max_model_len = 1 << 20
    router.links[0].silence()


@pytest.mark.slow
async def test_others_are_begun_and_aborted_meanwhile(router: ScriptedFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the frozen one is before nothing of theirs."""
    monkeypatch.setattr(leg, "MAX_UNSENT_BYTES", 1 << 30)
    call = router.generation.GenerateMany(timeout=60)
    with router.busy(1), router.busy(2):
        for number in range(20):
            await call.write(asked(f"large {number}", LARGE))
        await until(lambda: router.inflight[0] == 20)
    await call.write(asked("b"))
    number, stream = await router.running("b")
    await call.write(Request(abort="b"))
    await until(lambda: stream.is_aborted)
    assert number != 0 and len(router.fleet.ready) == 3, "the kernel ends a connection over which nothing goes"
    router.links[0].let_go()
    await until(lambda: sum(router.num_submitted) == 21)
    call.cancel()


@pytest.mark.slow
async def test_when_enough_waits_for_it_others_get_what_would_follow(
    router: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what waits in the router is bounded."""
    monkeypatch.setattr(leg, "MAX_UNSENT_BYTES", MAX_UNSENT_BYTES)
    call = router.generation.GenerateMany(timeout=60)
    with router.busy(1), router.busy(2):
        for number in range(20):
            await call.write(asked(str(number), LARGE))
        await until(lambda: sum(router.inflight) == 2 * 99 + 20)
        assert router.num_submitted[0] == 0 < router.inflight[0] < 20
        await until(lambda: router.inflight[0] + sum(router.num_submitted) == 20)
    call.cancel()


@pytest.mark.slow
async def test_when_none_takes_more_the_caller_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one does; an abort of what waits meanwhile is heeded."""
    monkeypatch.setattr(leg, "MAX_UNSENT_BYTES", MAX_UNSENT_BYTES)
    async with scripted_fleet(1) as router:
        freeze(router)
        call = router.generation.GenerateMany(iter([asked(str(each), LARGE) for each in range(20)]), timeout=60)
        async with asyncio.timeout(STEP_S):
            while not (waiting := router.service.waiting.abort(None)):
                await turns()
        (item,) = (await call.read()).items
        assert [item.request_id] == waiting
        assert item.response.outputs[0].finish.reason == generation_pb2.FINISH_REASON_ABORTED
        router.links[0].let_go()
        await until(lambda: router.num_submitted == [19])
        call.cancel()
