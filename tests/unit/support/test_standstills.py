"""Tests that run several times with event loops that stand still, in a run of pytest of their own."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONFTEST = """
from tests.support import standstills

def pytest_addoption(parser):
    standstills.add_option(parser)

def pytest_configure(config):
    config.pluginmanager.register(standstills.Standstills(standstills.parse_seeds(config.option.standstills)))
"""
TESTS = """
import asyncio
import time
from pathlib import Path
import pytest

def note(what):
    with Path("ran").absolute().open("a") as file:
        file.write(f"{what} ")

@pytest.fixture(scope="module")
def engine():
    note("engine")

@pytest.fixture
def request_id():
    note("begun")
    yield
    note("ended")

def test_without_a_loop(engine):
    note("pure")

async def test_with_one(engine, request_id):
    note("async")

async def test_that_is_late():
    began_s = time.monotonic()
    for _ in range(5000):
        await asyncio.sleep(0)
    assert time.monotonic() - began_s < 1
"""


def test_a_test_with_a_loop_runs_and_stands_still_once_for_each_seed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nasyncio_mode = auto\n")
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "--standstills", "3-5"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "-c", "pytest.ini"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (tmp_path / "ran").read_text().split() == [
        *("engine", "pure", "pure"),
        *3 * ("begun", "async", "ended"),
    ], done.stdout + done.stderr
    assert re.findall(r"^at turn \d+, seed (\d)$", done.stdout, re.MULTILINE) == ["3", "4", "5"], done.stdout
    assert "3 failed, 5 passed" in done.stdout
