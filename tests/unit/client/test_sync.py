"""The client for threads. The daemon runs on the test's event loop, the client in a worker thread."""

import asyncio
import inspect

import pytest

from genserve.client import AsyncClient, Client
from genserve.errors import PauseLeaseLostError
from tests.unit.client.scripted_daemon import ScriptedDaemon


async def test_generate_returns_the_whole_text(daemon: ScriptedDaemon) -> None:
    """The blocking call answers what the asynchronous one does."""

    def generate() -> str:
        with Client(daemon.target) as client:
            return client.generate("x").text

    assert await asyncio.to_thread(generate) == "Once upon a time"


async def test_stream_closed_early_cancels_the_request_in_the_daemon(daemon: ScriptedDaemon) -> None:
    """Leaving the loop over a stream ends the RPC, although the daemon has more to say."""
    daemon.hangs_after = 2

    def read_two() -> list[str]:
        texts = []
        with Client(daemon.target) as client:
            for delta in client.stream("x"):
                texts.append(delta.text)
                if len(texts) == 2:
                    break
            asyncio.run_coroutine_threadsafe(asyncio.wait_for(daemon.cancelled.wait(), 10), loop).result()
        return texts

    loop = asyncio.get_running_loop()
    assert await asyncio.to_thread(read_two) == ["Once", " upon"]


async def test_paused_resumes_when_the_block_is_interrupted(daemon: ScriptedDaemon) -> None:
    """Ctrl-C inside `with client.paused()` gives the lease back and stays a KeyboardInterrupt."""

    def interrupted() -> None:
        with Client(daemon.target) as client, pytest.raises(KeyboardInterrupt), client.paused():
            raise KeyboardInterrupt

    await asyncio.to_thread(interrupted)
    assert daemon.resumed == ["lease-1"]


async def test_paused_raises_when_the_lease_was_lost(daemon: ScriptedDaemon) -> None:
    """A lease that somebody else ended is told of at the end of the block."""

    def lose() -> None:
        with Client(daemon.target) as client, pytest.raises(PauseLeaseLostError), client.paused():
            daemon.leases.clear()

    await asyncio.to_thread(lose)


async def test_works_where_an_event_loop_is_running(daemon: ScriptedDaemon) -> None:
    """A notebook's cell runs on a loop; two clients, and one used by two threads, do not disturb it."""
    with Client(daemon.target) as one, Client(daemon.target) as two:
        statuses = await asyncio.gather(
            asyncio.to_thread(one.status), asyncio.to_thread(one.status), asyncio.to_thread(two.status)
        )
        assert [each.load.running for each in statuses] == [3, 3, 3]


def test_a_closed_client_says_so() -> None:
    """Closing twice is fine; calling afterwards is not, and does not hang."""
    client = Client("127.0.0.1:1")
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.status()


def test_every_call_of_the_async_client_is_there_with_its_documentation() -> None:
    """The two clients cannot drift apart. A stream that is written to while it is read needs a loop: threads have
    generate_as_completed."""
    for name, method in inspect.getmembers(AsyncClient, inspect.isfunction):
        if not name.startswith("_") and name != "stream_many":
            assert getattr(Client, name).__doc__, name
            if name != "close":
                assert getattr(Client, name).__doc__ == method.__doc__
