"""Memory that the tests of a file leave open, in a run of pytest of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONFTEST = """
from tests.support import memory_files

def pytest_configure(config):
    config.pluginmanager.register(memory_files.GivenBack())
"""
TESTS = """
import pytest
from genserve.memory.arena import Arena

@pytest.fixture(scope="module")
def held():
    arena = Arena.allocate(1)
    yield arena
    arena.close()

def test_first(held):
    {first}

def test_last(held):
    {last}
"""


@pytest.mark.parametrize(
    ("first", "last", "status"),
    [
        ("Arena.allocate(1)", "pass", 1),
        ("Arena.allocate(1).close()", "pass", 0),
        ("Arena.allocate(1)", "assert held.closed", 1),
    ],
    ids=["left", "closed", "left by a file that fails"],
)
def test_a_file_that_leaves_memory_open_fails(tmp_path: Path, first: str, last: str, status: int) -> None:
    """Its last test does, when all fixtures have ended; a failure is told alone, because it holds what it has seen."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_other.py").write_text("def test_before():\n    pass\n")
    (tmp_path / "test_tried.py").write_text(TESTS.format(first=first, last=last))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GENSERVE_TEST_PATIENCE": "0.01"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == status, run.stdout
    is_left = status == 1 and last == "pass"
    assert ("1 error" in run.stdout) == is_left
    assert ("the tests of test_tried.py leave open: genserve-arena\n" in run.stdout) == is_left
