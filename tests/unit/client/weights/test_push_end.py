"""What is left of a push that has ended."""

import asyncio
from typing import Any

import numpy
import pytest
from google.rpc import code_pb2

from genserve.client import AsyncClient, PushProgress
from genserve.errors import DeadlineError, VersionNotNewerError
from genserve.transport.errors import ClientClosedError
from tests.support.patience import STEP_S
from tests.support.scripted_services import ScriptedDaemon, refuse


def unfinished() -> list[str]:
    """What of a push still runs."""
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    return [each.__qualname__ for each in coroutines if each is not None and "Upload" in each.__qualname__]


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize(
    "how", ["one stream is refused", "the caller's code fails", "it is cancelled", "its time is up"]
)
async def test_nothing_of_a_push_runs_on_after_its_end(
    daemon: ScriptedDaemon, client: AsyncClient, how: str, streams: int
) -> None:
    """The weights may change then, whichever of its streams had more to send."""
    begun: list[Any] = []
    all_begun = asyncio.Event()

    async def begin(context: Any) -> None:
        begun.append(context)
        if len(begun) == streams:
            all_begun.set()
        await all_begun.wait()
        if how == "one stream is refused" and context is begun[0]:
            await refuse(context, code_pb2.ABORTED, "VERSION_NOT_NEWER", "no")
        await asyncio.Event().wait()

    def progress(_: PushProgress) -> None:
        if how == "the caller's code fails":
            raise ZeroDivisionError

    daemon.fail = begin
    timeout_s = 0.2 if how == "its time is up" else None
    weights = {name: numpy.zeros(1 << 20, "uint8") for name in "abc"}
    pushing = asyncio.create_task(
        client.push_weights(
            weights, version=1, streams=streams, chunk_bytes=1000, progress=progress, timeout_s=timeout_s
        )
    )
    if how == "it is cancelled":
        await asyncio.wait_for(all_begun.wait(), STEP_S)
        assert unfinished() != []
        pushing.cancel()
    with pytest.raises((VersionNotNewerError, ZeroDivisionError, asyncio.CancelledError, DeadlineError)):
        await pushing
    assert unfinished() == []


@pytest.mark.parametrize("turns", range(6))
async def test_a_client_that_is_closed_ends_a_push_with_its_own_error(daemon: ScriptedDaemon, turns: int) -> None:
    """In whichever turn of the event loop, also between the channels of the streams and their calls."""
    client = AsyncClient(daemon.target)
    await client.status()  # the channel is open: nothing waits for it
    daemon.fail = lambda _: asyncio.Event().wait()
    weights = {name: numpy.zeros(1000, "uint8") for name in "abc"}
    pushing = asyncio.create_task(client.push_weights(weights, version=1, streams=3))
    for _ in range(turns):
        await asyncio.sleep(0)
    await client.close()
    with pytest.raises(ClientClosedError):
        await pushing
