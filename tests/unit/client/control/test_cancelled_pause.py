"""What a pause leaves whose caller is cancelled."""

import asyncio
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from genserve.client import AsyncClient
from genserve.v1 import control_pb2, types_pb2
from tests.support.scripted_services import ScriptedDaemon


async def cancelled_pause(daemon: ScriptedDaemon, client: AsyncClient, request_id: str = "") -> None:
    """Cancels a pause that has reached the daemon, which holds the lease of somebody else."""
    await client.pause()
    reached = asyncio.Event()

    async def hang(context: Any) -> None:
        daemon.fail = None
        reached.set()
        await asyncio.Event().wait()

    daemon.fail = hang
    pausing = asyncio.create_task(client.pause("abort", no_expiry=True, holder="me", request_id=request_id))
    await reached.wait()
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing


async def test_a_cancelled_pause_asks_for_a_lease_that_would_not_last(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """If none was granted before, the daemon grants this one, and it may be that nobody gets the answer."""
    await cancelled_pause(daemon, client)
    assert daemon.pauses[-1].request_id
    daemon.pauses[-1].ClearField("request_id")
    moment = Duration(seconds=2)
    keep, reuse = types_pb2.PAUSE_MODE_KEEP, types_pb2.KV_POLICY_REUSE
    assert daemon.pauses[1:] == [
        control_pb2.PauseRequest(mode=keep, kv_policy=reuse, holder="me", ttl=moment, timeout=moment)
    ]
    assert daemon.resumed == ["lease-1"]


@pytest.mark.parametrize("pauses", ["pause", "paused"])
async def test_a_cancellation_stays_one_though_the_client_is_closed_at_once(
    daemon: ScriptedDaemon, client: AsyncClient, pauses: str
) -> None:
    """Nothing can be given back then, which is nothing that a cancelled task is to fail with."""
    reached = asyncio.Event()

    async def hang(context: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    async def hold() -> None:
        if pauses == "pause":
            daemon.fail = hang
            await client.pause()
        async with client.paused():
            reached.set()
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await reached.wait()
    holding.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await holding


async def test_a_cancelled_repeat_does_not_end_the_lease_of_the_first_one(
    daemon: ScriptedDaemon, client: AsyncClient
) -> None:
    """Whoever has chosen the id may hold it."""
    await cancelled_pause(daemon, client, "r")
    assert (len(daemon.pauses), daemon.resumed) == (1, [])
