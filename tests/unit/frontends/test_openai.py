"""How the process of an OpenAI server is started again, given up and ended."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from genserve.control.state import StateBoard
from genserve.frontends import processes as module
from genserve.frontends.processes import OpenAIServer
from genserve.process import supervisor
from tests.support.patience import turns, until
from tests.support.said import Said
from tests.unit.frontends.scripted_openai import Processes, answer, fail, no_more_files, stay
from tests.unit.frontends.scripted_seat import Seat


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not wait between two processes, and gives up early."""
    monkeypatch.setattr(supervisor, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 3)


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Said:
    return Said(capfd)


def made(processes: Processes, seat: Seat | None = None) -> OpenAIServer:
    """A server that nobody has started."""
    engine: Any = SimpleNamespace(weights=SimpleNamespace(version=0))
    board = StateBoard(engine, lambda: (), "id")
    return OpenAIServer(processes, processes.listener, "http", seat or Seat(), board)


@asynccontextmanager
async def kept(processes: Processes, seat: Seat) -> AsyncIterator[OpenAIServer]:
    """A server that serves, and is kept going."""
    server = made(processes, seat)
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
    with pytest.raises(RuntimeError, match=r"^OpenAI server on port \d+: .* \(it ended with status 3\)$"):
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
    monkeypatch.setattr(module, "OPENAI_START_TIMEOUT_S", 0.2)
    server = made(Processes(stay))
    with pytest.raises(RuntimeError, match=r"has not answered 'join' within 0\.2 s \(it was ended by SIGKILL\)"):
        await server.start(asyncio.Event())
    await server.stop()


async def test_it_is_asked_about_its_requests_as_a_front_end_is() -> None:
    """And what it leaves in the engine is ended there."""
    seat = Seat()
    async with kept(Processes(answer), seat) as server:
        assert str(server) == f"http://127.0.0.1:{server.port}"
        assert (await server.pausing(), server.num_requests, await server.interrupted()) == (2, 3, 5)
        await server.wait_idle()
        server.refuse()
        await server.wait_ended()
        await until(lambda: ("abort", ["left"]) in seat.calls)
    assert seat.calls == ["vacate", ("abort", ["left"]), "close"]


@pytest.mark.slow
async def test_a_server_that_fails_again_and_again_is_given_up(soon: None, said: Said) -> None:
    """The daemon serves on, and nobody can connect any more."""
    processes = Processes(answer, fail)
    async with kept(processes, Seat()) as server:
        processes.started[0].kill()
        await until(lambda: len(said.lines) >= 3)
        name, failed = "OpenAI server on port 7", r"it did not start: .* \(it ended with status 3\)"
        died, *failures = said.lines
        assert died == f"{name}: it was ended by SIGKILL; it is started again in 0.01 s"
        assert re.fullmatch(rf"{name}: {failed}; it is started again in 0\.02 s", failures[0])
        assert re.fullmatch(rf"{name}: {failed}, 3 times within \d+ s; it stays down", failures[1])
        assert len(processes.started) == 3
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", server.port)


async def test_a_server_that_does_not_answer_is_replaced(
    soon: None, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not read its tokens either. What it left in the engine is ended."""
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "ALIVE_TIMEOUT_S", 0.2)
    processes, seat = Processes(answer), Seat(hangs_in="changed")
    async with kept(processes, seat):
        await until(lambda: len(said.lines) >= 1)
        seat.script.clear()
        await until(lambda: ("abort", ["left"]) in seat.calls and len(processes.started) >= 2)
        assert "OpenAI server on port 7: it does not answer, and is killed" in said.lines
        assert processes.started[0].exitcode < 0


async def test_a_process_that_cannot_be_started_again_is_tried_again(soon: None, said: Said) -> None:
    """Whether the daemon or the machine has no more files or processes: gRPC serves on, and so does HTTP a bit
    later."""
    processes = Processes(answer)
    async with kept(processes, Seat()):
        with no_more_files():
            processes.started[0].kill()
            await until(lambda: len(said.lines) >= 2)
        await until(lambda: len(processes.started) >= 2)
        assert said.lines[0].endswith(": it was ended by SIGKILL; it is started again in 0.01 s")
        assert re.search(r": it cannot be started: .*Too many open files.*; it is started again", said.lines[1])
        processes.started[1].kill()
        await until(lambda: len(said.lines) >= 3)
        assert re.search(r"it was ended by SIGKILL\)?, 3 times within \d+ s; it stays down$", said.lines[2])


async def test_a_server_that_ran_for_a_while_has_not_failed(
    soon: None, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again however often it ends, and as soon as the first time."""
    monkeypatch.setattr(supervisor, "LONG_LIFE_S", 0.0)
    processes = Processes(answer)
    async with kept(processes, Seat()):
        for number in range(4):
            processes.started[number].kill()
            await until(lambda number=number: len(processes.started) > number + 1)
    assert [line.partition("; ")[2] for line in said.lines] == ["it is started again in 0.01 s"] * 4


async def test_a_server_that_is_killed_with_its_daemon_is_not_started_again(soon: None, said: Said) -> None:
    """An engine that has died ends both."""
    processes, seat = Processes(answer), Seat()
    async with kept(processes, seat) as server:
        server.kill()
        await until(lambda: ("abort", ["left"]) in seat.calls)
        await turns()
        assert (said.lines, len(processes.started)) == ([], 1)
