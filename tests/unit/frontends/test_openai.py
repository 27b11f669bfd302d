"""How the process of an OpenAI server is started again, given up and ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from genserve.control.state import StateBoard
from genserve.frontends import openai as module
from genserve.frontends import supervisor
from genserve.frontends.openai import OpenAIServer
from tests.support.patience import turns, until
from tests.unit.frontends.scripted_openai import Processes, answer, fail, no_more_files, stay
from tests.unit.frontends.scripted_seat import Seat


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not wait between two processes, and gives up early."""
    monkeypatch.setattr(module, "_FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(module, "_MAX_FAILURES", 3)


def made(processes: Processes, seat: Seat | None = None, said: list[str] | None = None) -> OpenAIServer:
    """A server that nobody has started."""
    engine: Any = SimpleNamespace(weight_version=0)
    board = StateBoard(engine, lambda: (), "id")
    return OpenAIServer(processes, seat or Seat(), board, [].append if said is None else said.append)


@asynccontextmanager
async def kept(processes: Processes, seat: Seat, said: list[str]) -> AsyncIterator[OpenAIServer]:
    """A server that serves, and is kept going."""
    server = made(processes, seat, said)
    await server.start(asyncio.Event())
    keeping = asyncio.create_task(server.run())
    try:
        yield server
        assert not keeping.done()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await server.stop()


async def test_a_process_that_ends_while_it_starts_is_an_error() -> None:
    """At the start of the daemon. The text says how it has ended."""
    server = made(Processes(fail))
    with pytest.raises(RuntimeError, match=r"the OpenAI server did not start: .* \(ended with status 3\)"):
        await server.start(asyncio.Event())
    await server.stop()


async def test_a_daemon_that_is_to_stop_does_not_wait_for_its_server() -> None:
    """Which is ended, although it does not serve yet."""
    stopped = asyncio.Event()
    processes = Processes(stay)
    server = made(processes)
    stopped.set()
    await server.start(stopped)
    await server.stop()
    assert processes.started[0].exitcode < 0


async def test_a_process_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while. It is killed, as it does not end either."""
    monkeypatch.setattr(module, "_START_TIMEOUT_S", 0.2)
    server = made(Processes(stay))
    with pytest.raises(RuntimeError, match=r"has not answered 'join' within 0\.2 s \(was ended by SIGKILL\)"):
        await server.start(asyncio.Event())
    await server.stop()


async def test_it_is_asked_about_its_requests_as_a_front_end_is() -> None:
    """And what it leaves in the engine is ended there."""
    seat = Seat()
    async with kept(Processes(answer), seat, []) as server:
        assert str(server) == f"http://127.0.0.1:{server.port}"
        assert (await server.pausing(), server.num_requests, await server.interrupted()) == (2, 3, 5)
        await server.wait_idle()
        server.refuse()
        await server.wait_ended()
        await until(lambda: ("abort", ["left"]) in seat.calls)
    assert seat.calls == ["vacate", ("abort", ["left"]), "close"]


async def test_a_server_that_fails_again_and_again_is_given_up(soon: None) -> None:
    """The daemon serves on, and nobody can connect any more."""
    said: list[str] = []
    processes = Processes(answer, fail)
    async with kept(processes, Seat(), said) as server:
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


async def test_a_server_that_does_not_answer_is_replaced(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not read its tokens either. What it left in the engine is ended."""
    monkeypatch.setattr(supervisor, "_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(supervisor, "_ALIVE_TIMEOUT_S", 0.2)
    said: list[str] = []
    processes, seat = Processes(answer), Seat(hangs_in="changed")
    async with kept(processes, seat, said):
        await until(lambda: len(said) >= 1)
        seat.script.clear()
        await until(lambda: ("abort", ["left"]) in seat.calls and len(processes.started) >= 2)
        assert "the OpenAI server on port 7 does not answer, and is killed" in said
        assert processes.started[0].exitcode < 0


async def test_a_process_that_cannot_be_started_again_is_tried_again(soon: None) -> None:
    """Whether the daemon or the machine has no more files or processes: gRPC serves on, and so does HTTP a bit
    later."""
    said: list[str] = []
    processes = Processes(answer)
    async with kept(processes, Seat(), said):
        with no_more_files():
            processes.started[0].kill()
            await until(lambda: len(said) >= 2)
        await until(lambda: len(processes.started) >= 2)
        assert said[0] == "openai: the server was ended by SIGKILL; it is started again in 0.01 s"
        assert said[1].startswith("openai: the server could not be started: ")
        assert "Too many open files" in said[1]
        processes.started[1].kill()
        await until(lambda: len(said) >= 3)
        assert said[2] == "openai: the server was ended by SIGKILL, after 3 starts: it is not started again"


async def test_a_server_that_ran_for_a_while_has_not_failed(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again however often it ends, and as soon as the first time."""
    monkeypatch.setattr(module, "_STEADY_S", 0.0)
    said: list[str] = []
    processes = Processes(answer)
    async with kept(processes, Seat(), said):
        for number in range(4):
            processes.started[number].kill()
            await until(lambda number=number: len(processes.started) > number + 1)
    assert said == ["openai: the server was ended by SIGKILL; it is started again in 0.01 s"] * 4


async def test_a_server_that_is_killed_with_its_daemon_is_not_started_again(soon: None) -> None:
    """An engine that has died ends both."""
    said: list[str] = []
    processes, seat = Processes(answer), Seat()
    async with kept(processes, seat, said) as server:
        server.kill()
        await until(lambda: ("abort", ["left"]) in seat.calls)
        await turns()
        assert (said, len(processes.started)) == ([], 1)
