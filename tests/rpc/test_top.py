"""`genserve top` on a daemon: the whole of it, but for the terminal."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from textual.pilot import Pilot

from genserve.cli.top.app import INTERRUPTED, TopApp
from genserve.cli.top.feed import Feed, Pace
from genserve.cli.top.frame import frame
from genserve.cli.top.lines import plain
from genserve.cli.top.screen import LinkState, Screen
from genserve.client import AsyncClient
from genserve.control.conditions import DaemonCondition
from genserve.control.state import StateBoard
from genserve.errors import UnavailableError
from genserve.rpc.server import DaemonServer
from genserve.settings.config import ServeConfig
from genserve.v1 import control_pb2, types_pb2
from genserve.v1.control_pb2_grpc import ControlServiceServicer, add_ControlServiceServicer_to_server
from genserve.weights.push.types import PushHeader
from tests.support.breakable_link import BreakableLink
from tests.support.clocks import advanced_clock
from tests.support.patience import until
from tests.support.ports import free_port
from tests.support.scripted_daemon import CHECKPOINT, Daemon, serving

HEADER = PushHeader("step-1", 1, manifest=CHECKPOINT.as_manifest())
QUICK = Pace(interval_s=0.1, silence_s=60.0)


@asynccontextmanager
async def shown(address: str, pace: Pace = QUICK) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    """The app, and who presses its keys."""
    async with AsyncClient(address) as client:
        app = TopApp(client, Screen(address, time.monotonic()), pace)
        async with app.run_test(size=(80, 24)) as pilot:
            yield app, pilot


def text(app: TopApp) -> str:
    """What is shown now."""
    return plain(frame(app.state, 80, 24, time.monotonic()))


async def test_a_push_is_shown_while_it_arrives_and_when_it_is_over(daemon: Daemon) -> None:
    """How far it has come, and then what became of it."""
    async with shown(daemon.address) as (app, _):
        await until(lambda: app.state.link.state is LinkState.LIVE)
        stream = await daemon.registry.open(HEADER)
        stream.write(0, bytes(8), None)
        await until(lambda: "receiving ██░░░░░░░░ 25% 8/32 B" in text(app))
        stream.write(8, bytes(24), None)
        await stream.finish()
        stream.detach()
        await until(lambda: "step-1  v1  applied  32 B" in text(app))
        assert "version 1 for" in text(app)


async def test_a_key_shuts_the_daemon_down(daemon: Daemon) -> None:
    """After it has been confirmed."""
    async with shown(daemon.address) as (app, pilot):
        await until(lambda: app.state.is_daemon)
        await pilot.press("d", "n")
        assert not daemon.stopped.is_set()
        await pilot.press("d", "y")
        await until(lambda: "drain the daemon: it is draining" in text(app))
        assert daemon.stopped.is_set()


async def test_keys_pause_and_resume_and_the_answer_is_shown(daemon: Daemon) -> None:
    """Nothing happens before the question is answered."""
    async with shown(daemon.address) as (app, pilot):
        await until(lambda: app.state.status is not None)
        await pilot.press("p", "n", "p")
        assert "Pause for 60 s?" in text(app) and daemon.engine.running
        await pilot.press("k")
        await until(lambda: "pause (keep): it is paused; requests kept 5, ended 0" in text(app))
        await until(lambda: bool(app.state.held_leases))
        assert "(you)" in text(app) and re.search(r"\b(60|5\d) s\b", text(app))
        await pilot.press("r", "y")
        await until(lambda: daemon.engine.running and "it is running" in text(app))
        await pilot.press("q")
    assert app.return_code == 0


async def test_leases_of_others_are_ended_only_on_purpose(daemon: Daemon) -> None:
    """By another key than the own one."""
    async with shown(daemon.address) as (app, pilot), AsyncClient(daemon.address) as trainer:
        await trainer.pause(holder="trainer")
        await until(lambda: app.state.status is not None and bool(app.state.status.state.pauses))
        await pilot.press("r", "y")
        await pilot.press("r")
        assert "f end all 1, held by trainer" in text(app) and not daemon.engine.running
        await pilot.press("f")
        await until(lambda: daemon.engine.running and "resume all: it is running" in text(app))


async def test_a_daemon_that_restarts_is_found_again() -> None:
    """Meanwhile it is shown as lost, with the reason, and what it told stays."""
    running = AsyncExitStack()
    port = free_port()
    daemon = await running.enter_async_context(serving(ServeConfig(port=port), instance_id="one"))
    async with shown(daemon.address) as (app, _):
        await until(lambda: app.state.link.state is LinkState.LIVE)
        await running.aclose()
        await until(lambda: "lost for" in text(app))
        assert "UNAVAILABLE" in text(app) and "── pauses" in text(app)
        async with serving(ServeConfig(port=port), instance_id="two"):
            await until(lambda: "it has restarted" in text(app) and "● live" in text(app))


async def test_a_daemon_that_says_nothing_any_more_is_lost(daemon: Daemon) -> None:
    """Though its connection is open: keys are not answered either, and none of this blocks the screen."""
    async with BreakableLink(daemon.address) as link, shown(link.address) as (app, pilot):
        await until(lambda: app.state.link.state is LinkState.LIVE)
        link.silence()
        with advanced_clock() as clock:
            for _ in range(4):  # a leap is a process that stood still, and ends one part of the silence
                await clock.advance(QUICK.silence_s / 4)
            await until(lambda: "it has said nothing for 60 s" in text(app))
            await pilot.press("p", "k")
            await until(lambda: "pause (keep) ..." in text(app))


class Refusing(ControlServiceServicer):
    """A daemon that does not know the token at first, and knows later that it is not one of an operator."""

    def __init__(self) -> None:
        self.knows = asyncio.Event()

    async def WatchStatus(self, request: Any, context: Any) -> AsyncIterator[control_pb2.WatchStatusResponse]:
        if not self.knows.is_set():
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is unknown")
        while True:
            yield control_pb2.WatchStatusResponse(state=types_pb2.EngineState(phase=types_pb2.PHASE_RUNNING))
            await asyncio.sleep(0.1)

    async def Pause(self, request: Any, context: Any) -> control_pb2.PauseResponse:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "Pause needs the role operator")
        return control_pb2.PauseResponse()


async def test_what_is_refused_is_reported_with_the_reason() -> None:
    """A watcher asks again, because another token may be in force later; a key that is not allowed says so."""
    server, refusing = grpc.aio.server(), Refusing()
    add_ControlServiceServicer_to_server(refusing, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with shown(address) as (app, pilot):
        await until(lambda: "UNAUTHENTICATED: the token is unknown" in text(app))
        refusing.knows.set()
        await until(lambda: "● live" in text(app))
        await pilot.press("p", "k")
        await until(lambda: "PERMISSION_DENIED: Pause needs the role operator" in text(app))
        assert "p pause (not allowed)" in text(app) and "● live" in text(app)
    await server.stop(0)


async def test_server_without_the_call_is_shown_as_such() -> None:
    """The screen goes on: a daemon may take the place of another server."""
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with shown(address) as (app, _):
        await until(lambda: app.state.link.state is LinkState.LOST)
        assert "UNSUPPORTED: what answers at" in text(app) and app.is_running
    await server.stop(0)


async def test_what_is_served_is_shown_once_the_engine_is_there() -> None:
    """While it starts nobody knows."""
    config, board = ServeConfig(port=0), StateBoard(None, tuple, "one", DaemonCondition.STARTING)
    server = await DaemonServer.open(config, board)
    async with shown(server.address) as (app, _):
        await until(lambda: "STARTING" in text(app))
        async with serving(config, opened=server, board=board) as daemon:
            board.become(DaemonCondition.SERVING)
            await until(lambda: app.state.info is not None)
            assert app.state.info is not None and app.state.info.model == daemon.engine.info.model
    await server.stop(0)


async def test_ctrl_c_ends_it_as_it_ends_other_commands(daemon: Daemon) -> None:
    """With the status of an interrupt, also while a question is asked."""
    async with shown(daemon.address) as (app, pilot):
        await pilot.press("p", "ctrl+c")
    assert app.return_code == INTERRUPTED


def taken_away(directory: Path) -> tuple[str, str]:
    """The name and content of the only file in a directory, which is removed with it."""
    (path,) = directory.iterdir()
    content = path.read_text()
    path.unlink()
    directory.rmdir()
    return path.name, content


async def test_a_key_saves_what_is_shown(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SVG in the working directory, with its name in a note; or the reason why not."""
    monkeypatch.chdir(tmp_path)
    async with shown(daemon.address) as (app, pilot):
        await until(lambda: app.state.status is not None)
        app.draw()
        await pilot.press("s")
        name, content = taken_away(tmp_path)
        assert "RUNNING" in content and f"saved {name}" in text(app)
        await pilot.press("s")
        assert "cannot be written" in text(app)


async def test_one_frame_needs_no_terminal(daemon: Daemon) -> None:
    """It has everything that was asked once; of a daemon that does not answer only the error."""
    stream = await daemon.registry.open(HEADER)
    async with AsyncClient(daemon.address) as client:
        screen = Screen(daemon.address, time.monotonic())
        await Feed(client, screen, QUICK).once()
    told = plain(frame(screen, 80, None, time.monotonic(), keys=False))
    assert "RUNNING  version 0" in told and "step-1" in told and "● live" in told
    stream.detach()
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError):
            await Feed(client, Screen("127.0.0.1:1", 0.0), QUICK).once()
