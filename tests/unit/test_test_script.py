"""scripts/test, in a checkout of its own: which Python runs the tests."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test"

# Says how it was called, and what it finds first under its name.
PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then [ -n "${LACKS:-}" ] || echo True; exit; fi
if [ "$1" = scripts/vllm_next.py ]; then exec echo /next/site; fi
echo "$0 $* offline=$HF_HUB_OFFLINE python=$(command -v python)"
if [ -n "$PYTHONPATH" ]; then echo "path=$PYTHONPATH"; fi
"""
SETUP = """#!/usr/bin/env bash
echo setup
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One whose environment is ready, and a second environment beside it."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts" / "test")
    programs = {"scripts/setup": SETUP, ".venv/bin/python": PYTHON, "gpu env/bin/python": PYTHON}
    for name, text in programs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


CHOSEN = ("-x", "tests/gpu")
# By file, so that what a module starts is started once; in the order in which they are found.
AT_A_TIME = "-n auto --dist loadfile --no-loadscope-reorder"


def run(checkout: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """scripts/test, from elsewhere."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GENSERVE_PYTHON", "HF_HUB_OFFLINE", "PYTHONPATH")
    }
    return subprocess.run(
        [checkout / "scripts" / "test", *arguments],
        env={**inherited, **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_checkouts_own_environment_runs_them_unless_another_is_named(checkout: Path) -> None:
    """It is set up first."""
    python = checkout / ".venv" / "bin" / "python"
    assert (
        run(checkout, *CHOSEN).stdout
        == f"setup\n{python} -m pytest {AT_A_TIME} -x tests/gpu offline=1 python={python}\n"
    )


@pytest.mark.parametrize("is_relative", [False, True])
def test_an_environment_that_is_named_runs_them_and_nothing_is_set_up(checkout: Path, is_relative: bool) -> None:
    """Such as one with vLLM's build for GPUs, which scripts/setup does not install."""
    python = checkout / "gpu env" / "bin" / "python"
    done = run(checkout, *CHOSEN, GENSERVE_PYTHON="gpu env/bin/python" if is_relative else str(python))
    assert done.stdout == f"{python} -m pytest {AT_A_TIME} -x tests/gpu offline=1 python={python}\n"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"GENSERVE_PYTHON": "/nope/python"}, "GENSERVE_PYTHON=/nope/python is not a program"),
        (
            {"GENSERVE_PYTHON": "gpu env/bin/python", "LACKS": "1"},
            "lacks vllm, pytest or pytest-xdist: gpu env/bin/python -m pip",
        ),
    ],
)
def test_an_environment_that_cannot_run_them_is_reported(
    checkout: Path, environment: dict[str, str], says: str
) -> None:
    """In one line, which names the variable."""
    done = run(checkout, *CHOSEN, **environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_quick_tests_are_those_without_an_engine(checkout: Path) -> None:
    """Options may follow, or paths instead of the leg's."""
    quick = "-m not slow --hypothesis-profile quick"
    assert (
        f"{AT_A_TIME} tests/unit tests/rpc tests/fleet tests/simulation {quick} -x offline"
        in run(checkout, "--quick", "-x").stdout
    )
    assert f"{AT_A_TIME} scripts -x offline" in run(checkout, "--quick", "scripts", "-x").stdout
    assert f"{AT_A_TIME} -x --quick offline" in run(checkout, "-x", "--quick").stdout, "it is the first argument"


def test_the_newest_vllm_is_put_in_front_of_the_installed_one(checkout: Path) -> None:
    """For those who have only a CPU. Options may follow; what is on the path stays on it."""
    done = run(checkout, "--vllm-next", "-x", PYTHONPATH="/mine")
    assert f"{AT_A_TIME} tests/engine tests/faults -x offline" in done.stdout
    chosen = run(checkout, "--vllm-next", "scripts", "-x").stdout
    assert f"{AT_A_TIME} scripts -x offline" in chosen, "paths are taken instead of the leg's"
    assert done.stdout.endswith("\npath=/next/site:/mine\n")
    assert run(checkout, "--vllm-next").stdout.endswith("\npath=/next/site\n")
    assert "path=" not in run(checkout).stdout
