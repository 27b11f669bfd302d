"""A process that receives pushes is killed, and the daemon with it."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.subject import started

pytestmark = pytest.mark.long(
    "genserve/ingest", "genserve/process", "genserve/client/weights/upload.py", "genserve/daemon/parts.py"
)


async def test_a_killed_receiver_takes_no_byte_along(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The push that it was receiving goes on, and later ones go through its successor; all end with the daemon."""
    monkeypatch.setattr("genserve.transport.channels.PUSH_MIN_BYTES", 0)
    monkeypatch.setattr("genserve.client.weights.calls.can_share", lambda *_: False)  # all pushes, also the oracle's
    async with started(checkpoints, tmp_path / "ingest", "--ingest-processes", "1") as subject:
        daemon = psutil.Process(subject.pid)

        def receivers() -> list[int]:
            return [each.pid for each in daemon.children() if "genserve.ingest" in each.cmdline()]

        (first,) = receivers()
        killed = False

        def kill(_: object) -> None:
            nonlocal killed
            if not killed:
                os.kill(first, signal.SIGKILL)
                killed = True

        result = await subject.push("b", shared_memory=False, progress=kill, push_id="through two")
        assert killed
        await subject.process.until_said("started again")
        async with asyncio.timeout(60):
            while not (running := receivers()) or running == [first]:
                await asyncio.sleep(0.05)
            (second,) = running
            while not any(each.status == psutil.CONN_LISTEN for each in psutil.Process(second).net_connections("tcp")):
                await asyncio.sleep(0.05)
        # The successor connects to the daemon, as the one before it did, when it gets a push. The one that was cut may
        # have gone on at the daemon itself while the successor started.
        await subject.oracle.holds((result.state.weight_version, "b"), settles=False)
        ending = psutil.Process(second)
        await asyncio.to_thread(subject.process.stop)
        assert subject.process.process.returncode == 0
        _, alive = await asyncio.to_thread(psutil.wait_procs, [ending], 60)
        assert alive == []
