"""Daemons that tests start: how long they may take, and how they end."""

import sys
from pathlib import Path

import pytest

from tests.support import daemon_process
from tests.support.daemon_process import DaemonProcess


def test_a_start_has_the_time_that_the_module_says_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests on a GPU raise it, because kernels are compiled at a first start."""
    monkeypatch.setattr(daemon_process, "START_TIMEOUT_S", 0.0)
    daemon = DaemonProcess(["--model", str(tmp_path)], tmp_path / "log", cold=True)
    with pytest.raises(AssertionError, match="did not serve within 0 s and was killed"):
        daemon.wait_serving()


@pytest.mark.slow
def test_a_daemon_that_starts_too_slowly_is_not_one_that_ended(tmp_path: Path) -> None:
    """It was killed here: whoever reads -9 would look for what has killed it."""
    daemon = DaemonProcess(["--model", str(tmp_path)], tmp_path / "log")
    with pytest.raises(AssertionError, match="did not serve within 0 s and was killed"):
        daemon.wait_serving(0)


def stand_in(log: Path, drained_with: int, *, serves: bool = True) -> DaemonProcess:
    """A daemon that takes a moment to drain, and ends with this status; at a second signal, with 143."""
    program = f"""
import os, signal, sys, time
def drain(number, frame):
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(143))
    print("draining", file=sys.stderr, flush=True)
    time.sleep(1)
    os._exit({drained_with})
signal.signal(signal.SIGTERM, drain)
print("genserve: serving nothing on 127.0.0.1:1", flush=True)
while True:
    signal.pause()
"""
    daemon = DaemonProcess([], log, within=(sys.executable, "-c", program), cold=True)
    return daemon.wait_serving() if serves else daemon


async def test_daemons_that_end_are_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal would end them at once, however they drain."""
    monkeypatch.setattr(daemon_process, "ending", [])
    daemon = stand_in(tmp_path / "log", 0)
    daemon.end()
    await daemon.until_said("draining")
    daemon.end()
    daemon_process.wait_ended()
    assert daemon.process.poll() == 0


def test_a_daemon_that_fails_when_it_ends_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at its exit status otherwise. The others are waited for."""
    monkeypatch.setattr(daemon_process, "ending", [])
    daemons = [stand_in(tmp_path / f"{number}", status) for number, status in enumerate((0, 1, 0))]
    for daemon in daemons:
        daemon.end()
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="to drain, and ended with 1")):
        daemon_process.wait_ended()
    assert [daemon.process.poll() for daemon in daemons] == [0, 1, 0]


def test_a_daemon_that_has_died_before_it_is_to_end_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a test has waited for that, or it never served."""
    monkeypatch.setattr(daemon_process, "ending", [])
    unseen, seen = (stand_in(tmp_path / name, 0) for name in ("unseen", "seen"))
    for daemon in (unseen, seen):
        daemon.process.kill()
    assert seen.exit_status(60) == -9
    unseen.process.wait(60)
    starting = stand_in(tmp_path / "starting", 0, serves=False)
    for daemon in (unseen, seen, starting):
        daemon.end()
    with pytest.RaisesGroup(pytest.RaisesExc(AssertionError, match="to drain, and ended with -9")):
        daemon_process.wait_ended()
    assert starting.has_ended
