"""How the process of an OpenAI server is started again, given up and ended."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from genserve.engine.vllm.openai import server as module
from genserve.engine.vllm.openai.relay import Relay
from genserve.engine.vllm.openai.server import OpenAIServer
from genserve.engine.vllm.requests.refusals import Serving
from tests.support.patience import turns, until
from tests.unit.engine.vllm.openai.ends import Engines, Meter, Tally, identity
from tests.unit.engine.vllm.openai.failing import Processes, fail, no_more_files, stay


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    """In front of an engine."""
    engines = Engines()
    relay = Relay(engines.place, [identity(0)], Tally(), 8, Meter(), Serving("v1"))
    yield relay
    relay.close()
    engines.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not wait between two processes, and gives up early."""
    monkeypatch.setattr(module, "_FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(module, "_MAX_FAILURES", 3)


async def begun(
    processes: Processes, relay: Relay, say: Callable[[str], None]
) -> tuple[OpenAIServer, "asyncio.Task[None]"]:
    """A server that is kept going, and the task that does it. Its first process is there, and does not answer."""
    server = OpenAIServer(processes, relay, say)  # type: ignore[arg-type]
    starting = asyncio.create_task(server.start(asyncio.Event()))
    await asyncio.sleep(0)
    starting.cancel()
    return server, asyncio.create_task(server.run())


async def test_a_process_that_ends_while_it_starts_is_an_error(relay: Relay) -> None:
    """At the start of the daemon. The text says how it has ended."""
    server = OpenAIServer(Processes(fail), relay, print)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="status 3"):
        await server.start(asyncio.Event())
    await server.stop()


async def test_a_daemon_that_is_to_stop_does_not_wait_for_its_server(relay: Relay) -> None:
    """Which is ended, although it does not serve yet."""
    stopped = asyncio.Event()
    processes = Processes(stay)
    server = OpenAIServer(processes, relay, print)  # type: ignore[arg-type]
    stopped.set()
    await server.start(stopped)
    await server.stop()
    assert processes.started[0].exitcode < 0


async def test_a_process_that_does_not_answer_is_an_error(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while. It is killed, as it does not end either."""
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "_STOP_TIMEOUT_S", 0.2)
    processes = Processes(stay)
    server = OpenAIServer(processes, relay, print)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"does not answer after 0\.2 s"):
        await server.start(asyncio.Event())
    await server.stop()
    assert processes.started[0].exitcode < 0


async def test_a_server_that_fails_again_and_again_is_given_up(relay: Relay, soon: None) -> None:
    """The daemon serves on, and nobody can connect any more."""
    said: list[str] = []
    processes = Processes(stay, fail)
    server, running = await begun(processes, relay, said.append)
    processes.started[0].kill()
    await until(lambda: len(said) >= 3)
    assert said == [
        "openai: the server was ended by SIGKILL; it is started again in 0.01 s",
        "openai: the server ended with status 3; it is started again in 0.02 s",
        "openai: the server ended with status 3, after 3 starts: it is not started again",
    ]
    assert len(processes.started) == 3
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", server.port)
    assert not running.done()
    running.cancel()
    await server.stop()


async def test_a_server_that_misbehaves_is_replaced(relay: Relay, soon: None) -> None:
    """What is wrong is said."""
    said: list[str] = []
    processes = Processes(stay)
    server, running = await begun(processes, relay, said.append)
    await asyncio.sleep(0)
    relay.why_broken = "it sings"
    relay.broken.set()
    await until(lambda: len(processes.started) >= 2)
    assert said[0] == "openai: the server is ended: it sings"
    assert processes.started[0].exitcode < 0
    server.kill()
    await server.wait_ended()
    running.cancel()
    await server.stop()
    assert len(processes.started) == 2


async def test_the_relay_ends_the_daemon_if_it_fails(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not silently: requests would not be answered any more."""
    failing = asyncio.Event()

    async def run(relay: Relay) -> None:
        await failing.wait()
        raise RuntimeError("no sockets")

    monkeypatch.setattr(Relay, "run", run)
    server, running = await begun(Processes(stay), relay, print)
    await turns()
    assert not running.done()
    failing.set()
    with pytest.raises(RuntimeError, match="no sockets"):
        await running
    server.kill()
    await server.stop()


async def test_a_process_that_cannot_be_started_again_is_tried_again(relay: Relay, soon: None) -> None:
    """Whether the daemon or the machine has no more files or processes: gRPC serves on, and so does HTTP a bit later.
    Neither a descriptor nor a file is left of the place that was made for it."""
    said: list[str] = []
    processes = Processes(stay)
    server, running = await begun(processes, relay, said.append)
    with no_more_files():
        processes.started[0].kill()
        await until(lambda: len(said) >= 2)
    await until(lambda: len(processes.started) >= 2)
    assert said[0] == "openai: the server was ended by SIGKILL; it is started again in 0.01 s"
    assert said[1].startswith("openai: the server could not be started: ")
    assert "Too many open files" in said[1]
    assert not running.done()
    server.kill()
    await server.wait_ended()
    running.cancel()
    await server.stop()
