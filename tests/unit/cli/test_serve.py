"""What `genserve serve` does before and beside the daemon."""

import subprocess
import sys
from pathlib import Path

_MAIN = """
import atexit, gc, multiprocessing

if __name__ != "__main__":
    atexit.register(lambda: print(gc.get_threshold()[0], gc.get_freeze_count() > 1000))

import genserve.cli

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=gc.isenabled)
    child.start()
    child.join()
"""


def test_spawned_processes_collect_less_and_not_at_their_end(tmp_path: Path) -> None:
    """As vLLM's are: they import the main script again."""
    (tmp_path / "main.py").write_text(_MAIN)
    child = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (child.stdout, child.stderr, child.returncode) == ("20000 True\n", "", 0)
