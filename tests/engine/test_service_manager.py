"""A real daemon under what systemd does: a socket in its environment."""

import signal
import socket
from pathlib import Path

from tests.support.daemon_process import SMALL_ENGINE, START_TIMEOUT_S, DaemonProcess


def test_a_daemon_tells_its_start_and_its_end(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """READY=1 comes after the steps, STOPPING=1 after the signal, and the watchdog is fed by the heartbeat."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(str(tmp_path / "notify"))
        end.settimeout(START_TIMEOUT_S)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1500000"}
        process = DaemonProcess(["--model", str(checkpoints["a"]), *SMALL_ENGINE], tmp_path / "stderr", environment)
        try:
            told: list[str] = []
            while "READY=1" not in told:
                told += end.recv(4096).decode().splitlines()
            statuses = list(dict.fromkeys(line for line in told if line.startswith("STATUS=")))
            assert "STATUS=starting: loading weights" in statuses
            assert statuses[-1] == "STATUS=running"
            assert "EXTEND_TIMEOUT_USEC=60000000" in told
            for _ in range(3):
                assert "WATCHDOG=1" in end.recv(4096).decode().splitlines()
            process.wait_serving()
            process.process.send_signal(signal.SIGTERM)
            while "STOPPING=1" not in (lines := end.recv(4096).decode().splitlines()):
                assert "STATUS=running" in lines
            assert "STATUS=draining" in lines
            assert process.process.wait(60) == 0
        finally:
            process.kill()
