"""`genserve top` as a process: with a terminal, which it leaves in order however it ends, and without one."""

import asyncio
import os
import pty
import signal
import sys
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from genserve.cli import main
from tests.support.scripted_services import ScriptedDaemon

PROGRAM = "import sys; from genserve.cli import main; sys.exit(main())"
BARE = f"import sys; sys.modules['textual'] = sys.modules['rich'] = None; {PROGRAM}"
"""Where only the client is installed."""
LEAVES_SCREEN = b"\x1b[?1049l"
SHOWS_CURSOR = b"\x1b[?25h"


class Terminal:
    """A terminal of 80 x 24, and what was written to it."""

    def __init__(self) -> None:
        self.written = b""
        self.changed = asyncio.Event()
        self._ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, (24, 80))
        self.before = termios.tcgetattr(self.theirs)
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def _read(self) -> None:
        try:
            self.written += os.read(self._ours, 1 << 16)
        except OSError:  # nobody has it open any more
            asyncio.get_running_loop().remove_reader(self._ours)
        self.changed.set()

    def type(self, keys: bytes) -> None:
        """As a user does."""
        os.write(self._ours, keys)

    async def until(self, holds: Callable[[bytes], bool]) -> None:
        """Waits until something was written."""
        async with asyncio.timeout(60):
            while not holds(self.written):
                self.changed.clear()
                await self.changed.wait()

    @property
    def is_in_order(self) -> bool:
        """Whether lines can be typed as before, on the screen of before, with a cursor."""
        last = self.written.rpartition(LEAVES_SCREEN)
        same = termios.tcgetattr(self.theirs)[:4] == self.before[:4]
        return same and bool(last[1]) and SHOWS_CURSOR in self.written.rpartition(b"\x1b[?25l")[2]

    def close(self) -> None:
        """Ends it."""
        asyncio.get_running_loop().remove_reader(self._ours)
        os.close(self._ours)
        os.close(self.theirs)


@asynccontextmanager
async def running(
    daemon: ScriptedDaemon, program: str = PROGRAM, shows: bytes = b"quit"
) -> AsyncIterator[tuple[Terminal, asyncio.subprocess.Process]]:
    """The command in a terminal, once it has shown this."""
    terminal = Terminal()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, "top", "--target", daemon.target),
        stdin=terminal.theirs,
        stdout=terminal.theirs,
        stderr=terminal.theirs,
        env={**os.environ, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    try:
        await terminal.until(lambda written: shows in written)
        yield terminal, process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        terminal.close()


@pytest.mark.slow
@pytest.mark.parametrize(("key", "status"), [(b"q", 0), (b"\x03", 130)])
async def test_a_key_ends_it(daemon: ScriptedDaemon, key: bytes, status: int) -> None:
    """And the terminal is as before."""
    async with running(daemon) as (terminal, process):
        terminal.type(key)
        assert await asyncio.wait_for(process.wait(), 30) == status
        await terminal.until(lambda written: LEAVES_SCREEN in written)
        assert terminal.is_in_order


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)], ids=str
)
async def test_a_signal_ends_it(daemon: ScriptedDaemon, number: signal.Signals, status: int) -> None:
    """As it ends other programs, with the terminal in order."""
    async with running(daemon) as (terminal, process):
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), 30) == status
        await terminal.until(lambda written: LEAVES_SCREEN in written)
        assert terminal.is_in_order


async def test_without_a_terminal_it_says_what_to_do(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """And never draws into a file."""
    assert await asyncio.to_thread(main, ["top", "--target", daemon.target]) == 1
    output = capsys.readouterr()
    assert output.out == "" and "--once" in output.err


async def test_once_prints_a_frame(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    """As text, without keys."""
    assert await asyncio.to_thread(main, ["top", "--once", "--target", daemon.target]) == 0
    output = capsys.readouterr().out
    assert "RUNNING  version 0" in output and "\x1b" not in output and "quit" not in output


def test_once_ends_with_the_error_of_a_daemon_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """As other commands do; and an interval that no daemon takes is refused by name."""
    assert main(["top", "--once", "--target", "127.0.0.1:1"]) == 1
    assert "UNAVAILABLE: no daemon answers at 127.0.0.1:1" in capsys.readouterr().err
    assert main(["top", "--once", "--interval", "50ms"]) == 1
    assert "--interval: must be at least 0.1 s" in capsys.readouterr().err


async def test_once_needs_no_textual(daemon: ScriptedDaemon) -> None:
    """The client alone is enough for it."""
    once = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BARE, "top", "--once", "--target", daemon.target, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(once.communicate(), 60)
    assert once.returncode == 0 and b"RUNNING" in output


async def test_without_textual_it_says_what_to_install(daemon: ScriptedDaemon) -> None:
    """And what works without it."""
    async with running(daemon, BARE, b", or print one frame with --once") as (_, process):
        assert await asyncio.wait_for(process.wait(), 30) == 1
