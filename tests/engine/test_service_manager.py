"""A real daemon under what systemd does: a socket in its environment."""

import socket
from pathlib import Path

import pytest

from genserve.client import Client
from tests.support.daemon_process import SMALL_ENGINE, START_TIMEOUT_S, DaemonProcess

pytestmark = pytest.mark.long(
    "genserve/control/service_manager.py", "genserve/control/drain.py", "genserve/control/state.py", "genserve/daemon"
)


def test_a_daemon_tells_its_start_and_its_end(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """READY=1 comes after the steps, and the watchdog is fed by the heartbeat. STOPPING=1 comes after a call of Drain,
    which lets a request that runs end."""
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
            with (
                Client(process.wait_serving().address) as client,
                client.stream([1, 2, 3], max_tokens=800, ignore_eos=True) as stream,
            ):
                next(stream)
                assert client.drain(drain_timeout_s=55).phase == "draining"
                usage = list(stream)[-1].usage
                assert usage is not None and usage.num_output_tokens == 800
            while "STOPPING=1" not in (lines := end.recv(4096).decode().splitlines()):
                assert "STATUS=running" in lines
            assert "STATUS=draining" in lines
            assert process.exit_status(60) == 0
            assert "genserve: Drain: draining, 55 s at most; a second signal exits at once" in process.stderr
        finally:
            process.kill()
