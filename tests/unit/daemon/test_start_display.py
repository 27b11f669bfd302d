"""What a start says of itself on stderr."""

import asyncio
import io
import logging
import pty
import re
import sys
import termios

import pytest

from genserve.control.conditions import DaemonCondition
from genserve.control.state import StateBoard
from genserve.daemon.start_display import show_start
from genserve.observe.last_line import ErasingHandler
from genserve.observe.notices import rewrite, say
from tests.support.patience import until


class Terminal(io.StringIO):
    """A person reads it."""

    def isatty(self) -> bool:
        """It is one."""
        return True


@pytest.fixture
def board() -> StateBoard:
    """Of a daemon that starts."""
    return StateBoard(None, tuple, "id", DaemonCondition.STARTING)


async def test_each_step_is_a_line_where_no_terminal_is(board: StateBoard, capsys: pytest.CaptureFixture[str]) -> None:
    """When it begins, and once, though something else changes. It ends when the daemon serves."""
    showing = asyncio.create_task(show_start(board))
    for step, now_s in (("loading weights", 100.0), ("loading weights", 105.0), ("compiling", 112.0)):
        board.tell_step(step, now_s)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    board.become(DaemonCondition.SERVING)
    await showing
    assert capsys.readouterr().err.splitlines() == [
        "genserve: loading weights (0 s since the start)",
        "genserve: compiling (12 s since the start)",
    ]


async def test_a_terminal_has_one_line_that_is_rewritten(board: StateBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second, too. What is said or logged next takes its place."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    logger = logging.Logger("of a test")
    logger.addHandler(ErasingHandler())
    showing = asyncio.create_task(show_start(board))
    board.tell_step("loading weights", 100.0)
    await until(lambda: terminal.getvalue().count("loading weights") > 1)
    board.become(DaemonCondition.SERVING)
    await showing
    logger.warning("a warning")
    rewrite("another line")
    say("ready")
    *shown, warning, last = terminal.getvalue().split("\r\x1b[K")
    assert (warning, last) == ("a warning\ngenserve: another line", "genserve: ready\n")
    assert all(re.fullmatch(r"genserve: loading weights, for \d+ s", each) for each in shown)


def test_a_line_is_cut_at_the_edge_of_the_terminal_behind_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that wraps could not be erased. Standard output has no size here: it is no terminal."""
    shown, behind = pty.openpty()
    termios.tcsetwinsize(behind, (24, 40))
    with open(shown, "rb", buffering=0) as shows, open(behind, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        rewrite("x" * 100)
        say("ready")
        seen = b""
        while not seen.endswith(b"ready\r\n"):  # a terminal may give what was written in parts
            seen += shows.read(1000)
        assert seen == b"genserve: " + b"x" * 29 + b"\r\x1b[Kgenserve: ready\r\n"
