"""Memory that tests leave open, in a run of pytest of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONFTEST = """
import pytest
from genserve.memory.arena import Arena
from tests.support import memory_files, standstills

def pytest_addoption(parser):
    standstills.add_option(parser)

def pytest_configure(config):
    config.pluginmanager.register(memory_files.GivenBack())
    standstills.register(config)

@pytest.fixture(scope="session")
def kept():
    arenas = []
    yield arenas
    for each in arenas:
        each.close()
"""
TESTS = """
import pytest
from genserve.memory.arena import Arena

def test_first(kept):
    {}

def test_last():
    pass
"""
LEAVES = "Arena.allocate(1)"


def run(directory: Path, first: str, *options: str) -> str:
    """What pytest says of two files, in the first of which the first test does this."""
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_it.py").write_text(TESTS.format(first))
    (directory / "test_other.py").write_text("def test_after():\n    pass\n")
    (directory / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\nasyncio_mode = auto\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rfEx", "--color=no", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        [*command, f"--rootdir={directory}", "-c", "pytest.ini"],
        cwd=directory,
        env={**os.environ, "GENSERVE_TEST_PATIENCE": "0.01"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    ).stdout


@pytest.mark.parametrize(
    ("options", "expected"),
    [([], 1), (["-n", "1"], 1), (["--standstills", "1-3"], 2)],
    ids=["alone", "worker", "twice"],
)
def test_memory_that_is_left_open_is_told_at_the_end(tmp_path: Path, options: list[str], expected: int) -> None:
    """When all other tests have run."""
    said = run(tmp_path, LEAVES, *options)
    assert said.count("ERROR test_other.py::test_after") == 1 and " 1 error in" in said
    errors, _, _summary = said.partition("short test summary info")  # which says it again where CI is set
    assert errors.count("test_it.py::test_first has left open: genserve-arena\n") == expected


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("Arena.allocate(1).close()", "3 passed in"),
        ("kept.append(Arena.allocate(1))", "3 passed in"),
        (f"{LEAVES}; assert 0", "1 failed, 2 passed in"),
        ("arena = Arena.allocate(1); view = arena.view(0, 1); arena.close(); pytest.xfail()", "2 passed, 1 xfailed in"),
    ],
    ids=["closed", "closed by a fixture", "failed", "expected to fail"],
)
def test_what_is_closed_and_what_a_failure_holds_is_none(tmp_path: Path, first: str, expected: str) -> None:
    """A failure is tried once more, and a second error of its test would be in the way of that."""
    assert expected in run(tmp_path, first)
