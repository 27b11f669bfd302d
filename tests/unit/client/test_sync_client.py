"""The client for threads. The daemon runs on the test's event loop, the client in a worker thread."""

import asyncio
import inspect
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from genserve.client import AsyncClient, BlockingStream, Client, ClientClosedError, Delta, PushProgress, Timeouts
from genserve.client.sync_client import blocking_context
from genserve.errors import DeadlineError, GenserveError, PauseLeaseLostError
from genserve.tensors.safetensors import StoredTensor
from genserve.transport.loop_thread import LoopThread
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S
from tests.support.refusals import refuses
from tests.support.scripted_services import ScriptedDaemon


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
                    asyncio.run_coroutine_threadsafe(asyncio.wait_for(daemon.hanging.wait(), STEP_S), loop).result()
                    break
            asyncio.run_coroutine_threadsafe(asyncio.wait_for(daemon.cancelled.wait(), STEP_S), loop).result()
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
    with pytest.raises(ClientClosedError):
        client.status()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda client: client.pause(ttl="30s"), r"pause\(\) got .* 'ttl'; is ttl_s meant\?"),
        (lambda client: client.push_weights({}, max_tokens=1), r"push_weights\(\) missing .* 'version'"),
    ],
)
def test_wrong_arguments_are_told_with_the_method(call: Callable[[Client], object], says: str) -> None:
    """With the keyword that is meant, if one is unknown."""
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError) as raised:
        call(client)
    assert re.fullmatch(says, str(raised.value))


def test_every_call_of_the_async_client_is_there_with_its_documentation() -> None:
    """The two clients cannot drift apart, but each says how it is used. A stream that is written to while it is read
    needs a loop: threads have generate_as_completed."""
    for name, method in inspect.getmembers(AsyncClient, inspect.isfunction):
        if not name.startswith("_") and name != "stream_many":
            documentation = getattr(Client, name).__doc__
            assert documentation, name
            assert not re.search("async|await|aclose", documentation), name
            if name != "close":
                in_threads = re.sub("`async with`", "`with`", method.__doc__ or "")
                assert documentation == re.sub("`aclose`", "`close`", in_threads)


async def test_progress_may_call_the_client(daemon: ScriptedDaemon) -> None:
    """It is called in the thread that pushes, and the last time at the end."""
    seen: list[PushProgress] = []
    threads: set[str] = set()

    def push() -> None:
        with Client(daemon.target) as client:

            def progress(each: PushProgress) -> None:
                seen.append(each)
                threads.add(threading.current_thread().name)
                assert client.status(timeout_s=5).load.running == 3

            weights = {"w": StoredTensor("w", "U8", (1000,), memoryview(bytes(1000)))}
            client.push_weights(weights, version=1, chunk_bytes=10, progress=progress)
            threads.discard(threading.current_thread().name)

    await asyncio.to_thread(push)
    assert seen[-1].sent_bytes == 1000
    assert threads == set()


async def test_an_error_of_progress_ends_the_push(daemon: ScriptedDaemon) -> None:
    """And is what the caller gets."""

    def push() -> None:
        def progress(_: PushProgress) -> None:
            raise ZeroDivisionError

        weights = {"w": StoredTensor("w", "U8", (1000,), memoryview(bytes(1000)))}
        with Client(daemon.target) as client, pytest.raises(ZeroDivisionError):
            client.push_weights(weights, version=1, chunk_bytes=10, progress=progress)

    await asyncio.to_thread(push)


async def test_a_stream_may_be_left_by_errors_again_and_again(daemon: ScriptedDaemon) -> None:
    """Each ends its request; the next one is not held up."""
    daemon.hangs_after = 1

    def read() -> None:
        with Client(daemon.target) as client:
            stream = client.stream("x")
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    fail(client.stream("x"))
            assert next(stream).text == "Once"
            stream.close()
            assert list(stream) == []
            with pytest.raises(ZeroDivisionError), client.stream("x") as deltas:
                fail(deltas)

    def fail(stream: BlockingStream[Delta]) -> None:
        for _ in stream:
            raise ZeroDivisionError

    await asyncio.to_thread(read)


@pytest.mark.slow
async def test_a_program_ends_with_a_stream_that_it_has_begun_to_read(daemon: ScriptedDaemon) -> None:
    """It lies in a global, and its finaliser runs when the client's thread is frozen already."""
    daemon.hangs_after = 1
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _LEAVES_A_STREAM, daemon.target,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert await program.communicate() == (b"Once\n", b"")
    assert program.returncode == 0
    await daemon.cancelled.wait()


_LEAVES_A_STREAM = """
import sys
from genserve.client import Client
client = Client(sys.argv[1])
stream = client.stream("x")
print(next(stream).text)
"""


class Blocking(dict[str, Any]):
    """A mapping of weights that blocks the client's loop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked, self.unblocked = threading.Event(), threading.Event()

    def items(self) -> Any:
        self.blocked.set()
        self.unblocked.wait(2 * STEP_S)
        return super().items()


async def test_caller_that_blocks_the_loop_does_not_block_threads_for_ever(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other calls end a little after their deadline, and so does closing."""
    monkeypatch.setattr("genserve.client.sync_client.LATE_S", 0.2)
    monkeypatch.setattr("genserve.transport.loop_thread.CLOSE_TIMEOUT_S", 0.2)
    weights, begun = Blocking(), threading.Event()

    def wait() -> None:
        begun.set()
        client.status(timeout_s=None)

    client = Client(daemon.target)
    pushing = asyncio.create_task(asyncio.to_thread(client.push_weights, weights, version=1))
    await asyncio.to_thread(weights.blocked.wait, STEP_S)
    waiting = asyncio.create_task(asyncio.to_thread(wait))
    await asyncio.to_thread(begun.wait, STEP_S)
    with refuses(DeadlineError, says="event loop"):
        await asyncio.to_thread(client.status, timeout_s=0.1)
    assert not waiting.done()
    await asyncio.to_thread(client.close)
    with pytest.raises(ClientClosedError):
        await waiting
    with pytest.raises(ClientClosedError):
        await pushing
    weights.unblocked.set()


async def test_an_item_is_not_waited_for_when_the_time_of_its_stream_is_over(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC ends the stream at its deadline, which a loop that is blocked does not tell."""
    monkeypatch.setattr("genserve.client.sync_client.LATE_S", 0.2)
    daemon.hangs_after = 1
    weights = Blocking()

    def begin() -> BlockingStream[Delta]:
        stream = client.stream("x", timeout_s=600.0)
        assert next(stream).text == "Once"
        return stream

    with advanced_clock() as clock, Client(daemon.target) as client:
        stream = await asyncio.to_thread(begin)
        pushing = asyncio.create_task(asyncio.to_thread(client.push_weights, weights, version=1))
        await asyncio.to_thread(weights.blocked.wait, STEP_S)
        await clock.advance(601)
        with refuses(DeadlineError, says="event loop"):
            await asyncio.to_thread(next, stream)
        weights.unblocked.set()
        with pytest.raises((ValueError, GenserveError)):
            await pushing


@pytest.mark.parametrize("timeout_s", [60.0, None])
async def test_an_item_is_waited_for_while_its_stream_may_take(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None
) -> None:
    """However late it is; without end if that was asked for."""
    monkeypatch.setattr("genserve.client.sync_client.LATE_S", 0.05)
    daemon.delay_s = 0.2

    def read() -> list[str]:
        with Client(daemon.target) as client:
            return [delta.text for delta in client.stream("x", timeout_s=timeout_s)]

    assert await asyncio.to_thread(read) == list(daemon.words)


async def test_an_interrupt_of_a_wait_for_an_item_ends_the_request(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller does not read on."""
    daemon.hangs_after = 1
    loop = asyncio.get_running_loop()

    def interrupted(_: LoopThread, coroutine: Coroutine[Any, Any, Any], limit_s: float | None) -> None:
        coroutine.close()
        raise KeyboardInterrupt

    def read() -> None:
        with Client(daemon.target) as client:
            stream = client.stream("x")
            assert next(stream).text == "Once"
            asyncio.run_coroutine_threadsafe(asyncio.wait_for(daemon.hanging.wait(), STEP_S), loop).result()
            with monkeypatch.context() as patched:
                patched.setattr(LoopThread, "run", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    next(stream)
            asyncio.run_coroutine_threadsafe(asyncio.wait_for(daemon.cancelled.wait(), STEP_S), loop).result()
            assert list(stream) == []

    await asyncio.to_thread(read)


class Holding(Client):
    """Holds something for a block."""

    @staticmethod
    @asynccontextmanager
    async def _hold(
        _: AsyncClient, ends: list[BaseException | None], handled: type[BaseException], *, timeout_s: float | None = 9
    ) -> AsyncIterator[str]:
        """Adds what has ended the block, unless it is of those that are handled, which go no further."""
        try:
            yield "held"
        except handled as error:
            ends.append(error)
        except BaseException as error:
            ends.append(error)
            raise
        else:
            ends.append(None)

    hold = blocking_context(_hold)


@pytest.mark.parametrize("control_s", [7.0, None])
def test_a_block_ends_as_it_would_with_asyncio(control_s: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for an interrupt, which is none of the loop's: there it is a cancellation. The end has the time of a call."""
    ends: list[BaseException | None] = []
    limits: list[float | None] = []
    with Holding("127.0.0.1:1", timeouts=Timeouts(control_s=control_s)) as client:
        run = LoopThread.run

        def remembered(thread: LoopThread, coroutine: Coroutine[Any, Any, Any], limit_s: float | None) -> Any:
            limits.append(limit_s)
            return run(thread, coroutine, limit_s)

        monkeypatch.setattr(LoopThread, "run", remembered)
        with client.hold(ends, KeyError) as held:
            assert held == "held"
        with client.hold(ends, KeyError):
            raise KeyError
        with pytest.raises(IndexError), client.hold(ends, KeyError):
            raise IndexError
        with pytest.raises(KeyboardInterrupt), client.hold(ends, asyncio.CancelledError):
            raise KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt), client.hold(ends, KeyError):
            raise KeyboardInterrupt
    assert [type(each) for each in ends] == [
        type(None), KeyError, IndexError, asyncio.CancelledError, asyncio.CancelledError
    ]  # fmt: skip
    assert limits == [9 + 5, None if control_s is None else control_s + 5] * 5
