import os
import re
import subprocess
import sys
import threading
import time

import pytest

from tests.support.costs import cpu_s

pytest_plugins = ["pytester"]

BURN = "import time\nends = time.process_time() + 0.3\nwhile time.process_time() < ends: pass\n"
CONFTEST = """
from tests.support import costs
def pytest_configure(config):
    config.pluginmanager.register(costs.Costs())
"""
TESTS = f"""
import subprocess, sys
def test_cheap(): pass
def test_dear(): subprocess.run([sys.executable, "-c", {BURN!r}], check=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_a_test_starts_is_its_cost(pytester: pytest.Pytester, workers: str) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TESTS)
    said = pytester.runpytest("-n", workers).stdout.str()
    used_s = {name: float(used) for used, name in re.findall(r"^ *([\d.]+) s of CPU +[\d.]+ s  (\S+)$", said, re.M)}
    assert used_s["test_it.py::test_dear"] >= 0.3 > used_s["test_it.py::test_cheap"]
    assert re.search(r"2 tests  \.$", said, re.M)


@pytest.mark.slow
def test_a_process_that_runs_counts() -> None:
    before_s = cpu_s(os.getpid())
    program = BURN + "print(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        assert cpu_s(os.getpid()) - before_s >= 0.3
        running.communicate(b"\n")


@pytest.mark.slow
def test_a_process_counts_while_threads_end() -> None:
    """It may be seen at one look and not at the next, and its whole time would be that of a test."""
    program = BURN + "print(flush=True)\ninput()"
    over = threading.Event()

    def start_threads() -> None:
        while not over.is_set():
            threading.Thread(target=time.sleep, args=(0.0005,)).start()

    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        starting = threading.Thread(target=start_threads)
        starting.start()
        try:
            looks = [cpu_s(os.getpid()) for _ in range(100)]
        finally:
            over.set()
            starting.join()
            running.communicate(b"\n")
    assert looks == sorted(looks)
