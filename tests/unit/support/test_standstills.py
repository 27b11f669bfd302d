"""Tests that run several times with event loops that stand still, in a run of pytest of their own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONFTEST = """
from tests.support import standstills

def pytest_addoption(parser):
    standstills.add_option(parser)

def pytest_configure(config):
    standstills.register(config)
"""
REPEATED = """
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
"""
FAILING = """
import asyncio
import itertools
import time
import pytest

made, run = itertools.count(1), itertools.count(1)

@pytest.fixture
def fragile():
    assert next(made) == 2, "not made"

def test_of_a_fixture(fragile):
    pass

async def test_that_is_late():
    print("attempt", next(run))
    began_s = time.monotonic()
    for _ in range(5000):
        await asyncio.sleep(0)
    assert time.monotonic() - began_s < 1

@pytest.mark.timeout(5)
async def test_that_waits():
    attempt = next(run)
    await asyncio.sleep(0.1)
    assert attempt != 4, "first"
    await asyncio.sleep(60 if attempt == 5 else 0)
"""


def run(directory: Path, tests: str, seeds: str) -> "subprocess.CompletedProcess[str]":
    """pytest over these tests."""
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_it.py").write_text(tests)
    (directory / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nasyncio_mode = auto\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--color=no", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, f"--rootdir={directory}", "-c", "pytest.ini", "--standstills", seeds],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_test_with_a_loop_runs_once_for_each_seed(tmp_path: Path) -> None:
    """Its own fixtures are made anew, and those of its module are not."""
    done = run(tmp_path, REPEATED, "3-5")
    ran = (tmp_path / "ran").read_text().split()
    assert ran == ["engine", "pure", "pure", *3 * ("begun", "async", "ended")], done.stdout + done.stderr
    assert "5 passed" in done.stdout


@pytest.mark.slow
def test_each_time_has_its_own_limit_and_evidence(tmp_path: Path) -> None:
    """A failure hides none that comes after it, of a fixture neither."""
    said = run(tmp_path, FAILING, "3-5").stdout
    assert re.findall(r"^(?:FAILED|ERROR) test_it.py::(\w+)", said, re.MULTILINE) == [
        *3 * ("test_that_is_late",),
        *2 * ("test_that_waits",),
        *2 * ("test_of_a_fixture",),
    ], said
    assert re.findall(r"^attempt (\d)$", said, re.MULTILINE) == ["1", "2", "3"]
    seeds = re.findall(r"^(?:at turn|none).*, seed (\d)$", said, re.MULTILINE)
    assert sorted(seeds) == ["3", "3", "3", "4", "4", "5", "5"], said
    assert "Timeout" in said


@pytest.mark.parametrize("seeds", ["x", "5-3", "-1"])
def test_seeds_that_are_none_are_refused(tmp_path: Path, seeds: str) -> None:
    """In a line."""
    done = run(tmp_path, REPEATED, seeds)
    assert (done.returncode, done.stdout) == (4, "")
    assert "--standstills" in done.stderr and "Traceback" not in done.stderr
