"""Errors of workers outside of tests, in a run of pytest of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONFTEST = """
import os
from tests.support import worker_errors

class Worker:
    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            {}

    def pytest_sessionfinish(self):
        {}

def pytest_configure(config):
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(Worker() if is_worker else worker_errors.WorkerErrors())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("report", "finish", "status", "says"),
    [
        ("pass", "pass", pytest.ExitCode.OK, "1 passed"),
        ("raise ValueError('in a hook')", "pass", pytest.ExitCode.INTERNAL_ERROR, "in a hook"),
        ("pass", "os.abort()", pytest.ExitCode.INTERNAL_ERROR, "worker gw0: Not properly terminated"),
    ],
    ids=["none", "in a hook", "at its end"],
)
def test_a_run_with_an_error_of_a_worker_does_not_pass(
    tmp_path: Path, report: str, finish: str, status: pytest.ExitCode, says: str
) -> None:
    """Although no test has failed."""
    (tmp_path / "conftest.py").write_text(CONFTEST.format(report, finish))
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-n1"]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "-c", "pytest.ini"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stdout
    assert says in done.stdout
