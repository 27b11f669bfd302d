"""What clients/python/quickstart.py, which scripts/demo runs, says when its daemon fails."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.rpc import code_pb2
from safetensors.numpy import save_file

from tests.support.scripted_services import ScriptedDaemon, refuse
from tests.support.warm import process

DEMO = Path(__file__).parents[3] / "clients" / "python" / "quickstart.py"


@pytest.mark.slow
@pytest.mark.parametrize("num_calls", [0, 1], ids=["the first answer", "streams and a push"])
async def test_a_demo_whose_daemon_fails_says_why_in_a_line(
    daemon: ScriptedDaemon, tmp_path: Path, num_calls: int
) -> None:
    """Without a traceback of each stream."""
    save_file({"w": np.ones((4, 4), np.float32)}, tmp_path / "model.safetensors")
    calls = 0

    async def fail(context: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > num_calls:
            await refuse(context, code_pb2.UNAVAILABLE, "ENGINE_DEAD", "the engine has died: EngineCore was killed")

    daemon.fail = fail
    command = [sys.executable, str(DEMO), "--target", daemon.target, "--model", str(tmp_path)]
    done = await asyncio.to_thread(process.run, command, timeout=120)
    assert done.returncode == 1
    assert done.stderr == "\n== The demo has failed\n  EngineDeadError: the engine has died: EngineCore was killed\n"
    assert (num_calls == 1) == ("long streams start" in done.stdout)
