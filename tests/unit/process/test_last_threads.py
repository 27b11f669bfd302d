"""A process ends, whatever its threads are at."""

import subprocess
import sys

import pytest

from tests.support.patience import STEP_S

PROGRAM = """
import asyncio, sys, threading
from genserve.process.last_threads import exit_within

async def work():
    if sys.argv[1] == "hangs":
        asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    exit_within(float(sys.argv[2]), 3, "the engine has died")

asyncio.run(work())
sys.exit(4)
"""


@pytest.mark.parametrize(("thread", "limit_s", "status"), [("hangs", "0.1", 3), ("none", "3600", 4)])
def test_a_thread_that_hangs_does_not_keep_a_process(thread: str, limit_s: str, status: int) -> None:
    """One that reads a directory on a host that is gone, say. A process that ends by itself does not wait."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, thread, limit_s], capture_output=True, text=True, timeout=STEP_S
    )
    assert done.returncode == status
    assert done.stderr.endswith("exits without it\ngenserve: the engine has died\n" if thread == "hangs" else "")
    assert bool(done.stderr) is (thread == "hangs")
