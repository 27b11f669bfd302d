"""Front ends are started, spoken to, started again and ended: real processes, without an engine."""

import asyncio
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from genserve.aio import cancel_all
from genserve.control.state import StateBoard
from genserve.errors import MessageTooLargeError
from genserve.frontends.frontend import ANSWER_TIMEOUT_S, FrontEnd
from genserve.frontends.processes import FrontEnds
from genserve.frontends.questions import FrontendSettings
from genserve.frontends.state import NUM_WORDS
from genserve.frontends.template import Template
from genserve.memory.words import SharedWords
from genserve.process import supervisor
from tests.support.clocks import advanced_clock
from tests.support.patience import START_S, STEP_S, turns, until
from tests.support.said import Said
from tests.unit.frontends.scripted_seat import Seat

Started = tuple[FrontEnds, StateBoard]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Said:
    return Said(capfd)


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    """A process that forks front ends without an engine."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.unit.frontends.scripted_frontend", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    template = Template(ours, process.pid)
    yield template
    template.close()


@asynccontextmanager
async def started(template: Template, *seats: Seat) -> AsyncIterator[Started]:
    """Front ends at these seats that are kept alive."""
    engine: Any = SimpleNamespace(weights=SimpleNamespace(version=0))
    board = StateBoard(engine, lambda: (), "id")
    words = SharedWords.create(NUM_WORDS, "state")

    async def abort(request_ids: Sequence[str] | None) -> bytes:
        return f"everywhere: {request_ids}".encode()

    settings = FrontendSettings(os.getpid(), 0, words.fd, (), 0)
    all_of_them = FrontEnds(template, seats, settings, board, abort)
    keeping: list[asyncio.Task[None]] = []
    try:
        await all_of_them.start()
        keeping.append(asyncio.create_task(all_of_them.run()))
        yield all_of_them, board
        assert not keeping[0].done()
    finally:
        await cancel_all(keeping)
        await all_of_them.stop()
        words.close()


def processes(template: Template) -> list[psutil.Process]:
    """The front ends that run."""
    running = []
    for each in psutil.Process(template.pid).children():
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if each.status() != psutil.STATUS_ZOMBIE:
                running.append(each)
    return running


async def test_what_is_asked_of_all_is_answered_by_all(template: Template) -> None:
    """They ask the daemon too. All of them end at the end, and nothing is left of a seat."""
    seats = Seat(), Seat()
    async with started(template, *seats) as (all_of_them, _):
        assert sorted(all_of_them.live_ports()) == sorted(each.pid for each in processes(template))
        assert await all_of_them.pausing() == 4
        assert all_of_them.num_requests == 6
        await all_of_them.wait_idle()
        assert await all_of_them.abort(["r"]) == 2 * ["n#1", "everywhere: ['r']"]
    assert processes(template) == []
    for seat in seats:
        assert seat.calls == [("use", "n", "r"), ("release", "r"), "vacate", "close"]


async def test_dead_process_restarts_on_its_port_and_its_leftovers_are_ended(template: Template, said: Said) -> None:
    """It is killed by a question; the others answer that one."""
    dying, other = Seat(dies_in="pausing"), Seat()
    async with started(template, dying, other) as (all_of_them, _):
        ports = all_of_them.live_ports()
        before = {each.pid for each in processes(template)}
        dying.script = {}
        assert await all_of_them.pausing() == 2
        await until(lambda: len(processes(template)) == 2 and {each.pid for each in processes(template)} != before)
        await until(lambda: ("abort", ["left"]) in dying.calls)
        async with asyncio.timeout(STEP_S):
            while await all_of_them.pausing() != 4:
                await asyncio.sleep(0.01)
        assert all_of_them.live_ports() == ports
        assert said.lines == [f"front end on port {ports[0]}: it was ended by SIGKILL; it is started again in 0.01 s"]
    assert other.calls == ["vacate", "close"]


async def test_one_that_does_not_answer_is_killed_and_started_again(template: Template, said: Said) -> None:
    """A pause waits for it until the deadline, and no longer."""
    hanging = Seat(hangs_in="pausing")
    with advanced_clock() as clock:
        async with started(template, hanging) as (all_of_them, _):
            before = [each.pid for each in processes(template)]
            hanging.script = {}
            pausing = asyncio.create_task(all_of_them.pausing())
            await clock.advance(ANSWER_TIMEOUT_S)
            assert await pausing == 0
            await until(lambda: processes(template) and [each.pid for each in processes(template)] != before)
            assert said.lines[0].endswith("it does not answer, and is killed")
            async with asyncio.timeout(STEP_S):
                while await all_of_them.pausing() != 2:
                    await asyncio.sleep(0.01)


async def test_oversized_question_fails_the_caller_and_kills_no_frontend(
    template: Template, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """A client may abort any number of ids: no front end is killed for that."""
    monkeypatch.setattr("genserve.frontends.link.MAX_JSON_BYTES", 1000)
    async with started(template, Seat(), Seat()) as (all_of_them, _):
        with pytest.raises(MessageTooLargeError):
            await all_of_them.abort(["x" * 1000])
        assert await all_of_them.pausing() == 4
        assert said.lines == []


@asynccontextmanager
async def alone(template: Template, seat: Seat) -> AsyncIterator[FrontEnd]:
    """One that nobody has started, and nobody keeps alive."""
    words = SharedWords.create(NUM_WORDS, "state")

    async def abort(request_ids: Sequence[str] | None) -> bytes:
        raise AssertionError

    settings = FrontendSettings(os.getpid(), 0, words.fd, (), 0)
    frontend = FrontEnd(template, seat, settings, abort)
    try:
        yield frontend
    finally:
        frontend.kill()
        await frontend.stop()
        words.close()


async def test_one_is_asked_about_its_requests_before_it_admits_any(template: Template) -> None:
    """A pause that came between the two would miss them."""
    async with alone(template, Seat(hangs_in="serve")) as frontend:
        starting = asyncio.create_task(frontend.start())
        await until(lambda: frontend.port != 0)
        told = await frontend.ask("pausing")
        assert told is not None and told["num_requests"] == 2
        assert not starting.done()
        frontend.kill()
        with pytest.raises(RuntimeError, match="did not start"):
            await starting


async def test_the_end_of_a_process_is_noted_once(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long nobody waits for it: the event loop would do nothing else."""
    loop = asyncio.get_running_loop()
    watched: set[Any] = set()
    add, remove = loop.add_reader, loop.remove_reader
    monkeypatch.setattr(loop, "add_reader", lambda fd, *rest: (watched.add(fd), add(fd, *rest)))
    monkeypatch.setattr(loop, "remove_reader", lambda fd: (watched.discard(fd), remove(fd))[1])
    async with alone(template, Seat()) as frontend:
        await frontend.start()
        assert len(watched) == 1
        frontend.kill()
        await until(lambda: not watched)
        await asyncio.wait_for(frontend.ended(), STEP_S)


async def test_what_a_push_costs_is_that_of_all(template: Template) -> None:
    """Tokens add up; the longest wait counts, and one whose requests did not run has none."""
    seats = [Seat(longest_wait_s=wait_s) for wait_s in (0.5, 2.5, None)]
    async with started(template, *seats) as (all_of_them, _):
        assert await all_of_them.interrupted() == 15
        assert await all_of_them.longest_wait_s() == 2.5
    async with started(template, Seat()) as (all_of_them, _):
        assert await all_of_them.longest_wait_s() is None


async def test_frontend_that_dies_has_no_longest_wait(template: Template) -> None:
    """Its streams have ended; the others tell theirs."""
    dying, other = Seat(dies_in="longest wait"), Seat(longest_wait_s=1.5)
    async with started(template, dying, other) as (all_of_them, _):
        dying.script = {}
        assert await all_of_them.longest_wait_s() == 1.5


async def test_one_that_dies_again_and_again_stays_down(template: Template, said: Said) -> None:
    """The others go on, and its port is not told any more."""
    dying, other = Seat(), Seat()
    async with started(template, dying, other) as (all_of_them, board):
        first, port = all_of_them.live_ports()
        dying.script = {"dies_in": "join"}
        os.kill(first, signal.SIGKILL)  # its port is the number of its process
        await until(lambda: all_of_them.num_down() == 1)
        assert all_of_them.live_ports() == (port,)
        died, *failed, down = said.lines
        assert died == f"front end on port {first}: it was ended by SIGKILL; it is started again in 0.01 s"
        assert [line.rpartition(" in ")[2] for line in failed] == ["0.02 s", "0.04 s", "0.08 s"]
        assert down.startswith(f"front end on port {first}: it did not start: ")
        assert re.search(r"\(it was ended by SIGKILL\), 5 times within \d+ s; it stays down$", down)
        board.notify()
        assert await all_of_them.pausing() == 2
        await all_of_them.wait_idle()


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_start_that_was_given_up_is_not_taken_for_a_later_one(
    template: Template, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    """The template stands still, and answers when nobody waits any more. What it has started then ends."""
    os.kill(template.pid, signal.SIGSTOP)
    for _ in range(2):
        settings, theirs = given_up_settings()
        with theirs, monkeypatch.context() as patch:
            if not is_cancelled:
                patch.setattr("genserve.frontends.template.ANSWER_TIMEOUT_S", 0.01)
            starting = asyncio.create_task(template.start(settings))
            if is_cancelled:
                await turns()
                starting.cancel()
            with pytest.raises((asyncio.CancelledError, OSError)):
                await starting
    os.kill(template.pid, signal.SIGCONT)
    async with started(template, Seat()) as (all_of_them, _):
        await until(lambda: tuple(each.pid for each in processes(template)) == all_of_them.live_ports())
        assert await all_of_them.pausing() == 2
    assert processes(template) == []


def given_up_settings() -> tuple[FrontendSettings, socket.socket]:
    """Of a front end to whose link nobody has the other end."""
    ours, theirs = socket.socketpair()
    ours.close()
    return FrontendSettings(os.getpid(), theirs.fileno(), theirs.fileno(), (), 0), theirs


async def test_a_start_that_fails_leaves_no_process(template: Template) -> None:
    """The daemon says so, and ends."""
    with pytest.raises(RuntimeError, match="did not start"):
        async with started(template, Seat(), Seat(dies_in="join")):
            raise AssertionError
    assert processes(template) == []


async def test_front_ends_ignore_signals_to_the_group_and_the_template_stays(said: Said) -> None:
    """They are for the daemon. A template that is gone is named, and front ends go on without it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.unit.frontends.scripted_frontend", str(theirs.fileno())]
    own = Template(ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]).pid)
    theirs.close()
    async with started(own, Seat()) as (all_of_them, _):
        (frontend,) = all_of_them.live_ports()
        for pid in (own.pid, frontend):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert await all_of_them.pausing() == 2
        own.close()
        own.close()
        assert await all_of_them.pausing() == 2
        os.kill(frontend, signal.SIGKILL)
        await until(lambda: all_of_them.num_down() == 1)
        await until(lambda: "does not answer" in said.lines[-1])


def test_a_template_is_forked_from_a_process_and_ends_with_it() -> None:
    """However it ends. What it has loaded, front ends have too; one that stands still ends as well."""
    program = (
        "import asyncio, os, signal, socket\n"
        "from genserve.frontends.questions import FrontendSettings\n"
        "from genserve.frontends.template import fork_template\n"
        "loaded = 'loaded'\n"
        "def run(settings):\n"
        "    os.write(settings.link_fd, f'{loaded} {settings.port}'.encode())\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "template = fork_template(run)\n"
        "async def main():\n"
        "    ours, theirs = socket.socketpair()\n"
        "    settings = FrontendSettings(os.getpid(), theirs.fileno(), theirs.fileno(), (), 0)\n"
        "    started = await template.start(settings)\n"
        "    print(ours.recv(100).decode(), template.pid, started.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=START_S, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    loaded, port, *pids = ended.stdout.split()
    assert (loaded, port) == ("loaded", "0")
    # Not psutil's wait: who ends stays in the list of processes until init has read its status, whenever that is.
    for pid in map(int, pids):
        with suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            assert select.select([process], [], [], STEP_S)[0], "it runs on"
            os.close(process)
