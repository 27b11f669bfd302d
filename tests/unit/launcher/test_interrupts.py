"""Who interrupts or kills the program that has launched a daemon, and what becomes of the daemon."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import genserve
from genserve.client import Client

Env = dict[str, str]

LAUNCHER = """
import sys, genserve
from genserve.launcher.daemon_process import DaemonProcess

stop = DaemonProcess.stop

def told(process, timeout_s):
    stop(process, timeout_s)
    print("told to stop", flush=True)

DaemonProcess.stop = told
with genserve.launch({model!r}, log={log!r}) as launched:
    print(launched.pid, flush=True)
    sys.stdin.read()
"""


def launcher(fake: Env, model: str, log: Path) -> tuple["subprocess.Popen[str]", psutil.Process]:
    """A program of its own that has launched a daemon, in a group as a terminal has it; and the daemon."""
    # Tests that run in the background of a shell ignore SIGINT, and so would what they start.
    heeding = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program = f"{heeding}import os\nos.environ.update({fake})\n" + LAUNCHER.format(model=model, log=str(log))
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    assert process.stdout is not None
    return process, psutil.Process(int(process.stdout.readline()))


@pytest.mark.slow
def test_a_daemon_ends_with_a_launcher_that_is_killed(fake: Env, tmp_path: Path) -> None:
    """It drains: what its other clients have begun may end."""
    process, daemon = launcher(fake, "whatever", tmp_path / "log")
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs([daemon], timeout=30)
    for each in alive:
        each.kill()
    assert alive == []
    assert "genserve: drained after SIGTERM" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_terminal_interrupt_ends_the_block_and_drains_the_daemon(fake: Env, tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group, and the daemon is not in it."""
    process, daemon = launcher(fake, "whatever", tmp_path / "log")
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in stderr
    assert not daemon.is_running()
    assert "genserve: drained after SIGTERM" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_a_second_interrupt_kills_the_daemon(fake: Env, tmp_path: Path) -> None:
    """One that takes too long to drain."""
    process, daemon = launcher(fake, "that ignores SIGTERM", tmp_path / "log")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "told to stop\n"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=50)  # less than it would wait for the daemon
    assert process.returncode == -signal.SIGINT
    assert not daemon.is_running()


def test_an_interrupt_while_the_client_is_closed_kills_the_daemon_too(
    fake: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client with much to cancel takes its time: an interrupt may come before the daemon was told to stop."""

    def interrupted(client: Client) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "close", interrupted)
    with pytest.raises(KeyboardInterrupt), genserve.launch("that ignores SIGTERM", env=fake) as launched:
        pass
    assert launched.exit_status == -signal.SIGKILL
