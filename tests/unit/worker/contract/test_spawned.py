"""Processes that the daemon starts through multiprocessing end with it, from their beginning."""

import subprocess
import sys
from pathlib import Path

import psutil

_MAIN = """
import multiprocessing, os, signal

is_daemon = True
from engine import core
from genserve.worker.contract import lifetime

lifetime.end_spawned_with_this_process()
child = multiprocessing.get_context("spawn").Process(target=core.run)
child.start()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
_CORE = """
import sys, threading

if not hasattr(sys.modules["__main__"], "is_daemon"):
    threading.Event().wait()

def run():
    pass
"""
_FORKED = """
import multiprocessing, threading
from genserve.worker.contract import lifetime

def watch():
    before = threading.active_count()
    lifetime.end_with_process(1)
    print(before, threading.active_count(), flush=True)

if __name__ == "__main__":
    watch()
    lifetime.end_with_process(1)
    worker = multiprocessing.get_context("fork").Process(target=watch)
    worker.start()
    worker.join()
    print(threading.active_count(), flush=True)
"""


def test_process_of_a_killed_daemon_ends_even_during_its_imports(tmp_path: Path) -> None:
    """The daemon is the __main__ of a package, which multiprocessing does not run again. Importing vLLM takes long, and
    then EngineCore waits for the daemon's first message for minutes."""
    package = tmp_path / "engine"
    package.mkdir()
    for name, text in {"__init__": "", "__main__": _MAIN, "core": _CORE}.items():
        (package / f"{name}.py").write_text(text)
    with subprocess.Popen([sys.executable, "-m", "engine"], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
    try:
        child = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    try:
        child.wait(60)
    except psutil.TimeoutExpired:
        child.kill()
        raise


def test_a_forked_process_watches_for_itself(tmp_path: Path) -> None:
    """Once: the thread of the process that has forked it is not there."""
    (tmp_path / "main.py").write_text(_FORKED)
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("1 2\n1 2\n2\n", "", 0)
