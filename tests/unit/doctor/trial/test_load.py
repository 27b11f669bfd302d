"""What is noticed of requests that run while weights are pushed, against a daemon that answers by a script."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo

from genserve.client import AsyncClient
from genserve.doctor.trial.load import NUM_STREAMS, LiveLoad, LoadLimits, live_load
from tests.support.scripted_services import ScriptedDaemon, refuse, running_daemon

LIMITS = LoadLimits(max_model_len=100, max_sequences=256)


@pytest.fixture
async def daemon() -> AsyncIterator[ScriptedDaemon]:
    """Its requests have four tokens, of which the last two are of version 1."""
    async with running_daemon() as running:
        yield running


@pytest.fixture
async def client(daemon: ScriptedDaemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.target) as connected:
        yield connected


async def test_a_request_that_has_all_of_its_tokens_is_followed_by_another(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """A push may take longer than any request."""
    async with live_load(client, LIMITS) as load, asyncio.timeout(60):
        for _ in range(3):
            latest = max(moment for slot in load.slots for each in slot.arrived_at for moment in each)
            assert await load.wait_all(latest, num_tokens=4) == ""
    assert len(daemon.requests) >= 2 * NUM_STREAMS
    assert {request.stop.max_tokens for request in daemon.requests} == {97}
    waits_s = load.waits_s(0.0, latest)
    assert waits_s and min(waits_s) >= 0
    assert load.waits_s(latest + 60, latest + 61) == []


async def test_a_request_that_is_refused_is_lost_with_its_error(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """While others go on."""
    async with live_load(client, LIMITS) as load, asyncio.timeout(60):
        daemon.fail = lambda context: refuse(context, 14, "ENGINE_DEAD", "the engine has died")
        assert "the engine has died" in await load.wait_all(1e12)


async def test_what_waits_for_tokens_that_do_not_come_can_be_given_up(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """And ends the requests in the daemon."""
    daemon.hangs_after = 3
    with pytest.raises(TimeoutError):
        async with live_load(client, LIMITS) as load, asyncio.timeout(1):
            await load.wait_all(1e12)
    await asyncio.wait_for(daemon.cancelled.wait(), 10)


def test_labels_must_cover_all_tokens_in_order_up_to_served_version() -> None:
    """Of every slot."""
    load = LiveLoad(AsyncClient("127.0.0.1:1"), LIMITS)
    for slot in load.slots:
        slot.versions = [0, 0, 1, 1]
    assert load.labels_are(1)
    assert not load.labels_are(2)
    load.slots[-1].covered = False
    assert not load.labels_are(1)
    load.slots[-1].covered, load.slots[-1].versions = True, [1, 0, 1]
    assert not load.labels_are(1)
    load.slots[-1].versions = []
    assert not load.labels_are(1)


@pytest.mark.parametrize(("max_sequences", "num_streams"), [(1, 1), (4, 4), (9, NUM_STREAMS)])
async def test_no_more_requests_run_than_the_daemon_takes(
    daemon: ScriptedDaemon, client: AsyncClient, max_sequences: int, num_streams: int
) -> None:
    """One that were refused, or waited for the others, would look like one that a push has ended."""
    daemon.hangs_after = 3
    async with live_load(client, LoadLimits(100, max_sequences)) as load:
        assert len(daemon.requests) == len(load.slots) == num_streams


@pytest.mark.parametrize(
    ("max_model_len", "given", "fitted"),
    [
        (2048, (30, 24), (30, 24)),
        (54, (30, 24), (27, 24)),
        (40, (30, 24), (20, 20)),
        (16, (3, 1900), (3, 13)),
        (2, (3, 1900), (1, 1)),
    ],
)
def test_prompt_and_output_fit_the_context(max_model_len: int, given: tuple[int, int], fitted: tuple[int, int]) -> None:
    """However short it is."""
    prompt, max_tokens = LoadLimits(max_model_len, 1).fitted(range(given[0]), given[1])
    assert (len(prompt), max_tokens) == fitted
    assert len(prompt) + max_tokens <= max_model_len


async def test_a_request_that_finds_no_room_comes_again(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """Those of the load before count in the daemon until it has noticed that they were cancelled."""
    num_refused = 0

    async def fail(context: Any) -> None:
        nonlocal num_refused
        if num_refused < 3:
            num_refused += 1
            await refuse(context, 8, "QUEUE_FULL", "full", RetryInfo(retry_delay=Duration(nanos=1)))

    daemon.fail = fail
    async with live_load(client, LoadLimits(100, 2)) as load, asyncio.timeout(60):
        assert await load.wait_all(0.0, num_tokens=4) == ""
    assert num_refused == 3
    assert all(each for slot in load.slots for each in slot.arrived_at[:-1])
