"""scripts/setup, in a checkout of its own: which commands it gives to uv and pip, and what it does when they fail.

Python, pip and uv are programs that write down how they were called and install nothing.
"""

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "scripts" / "setup"
LOCK = ["grpcio==1.85.1", "torch==2.13.0", "uv==0.13.8"]

# Stands for the base Python, and, copied by `-m venv`, for the environment's. FAILS lists what fails, a word each.
PYTHON = """#!/usr/bin/env bash
fails() { [[ " $FAILS " == *" $1 "* ]]; }
case "$*" in
  "-m pip config list") printf '%b' "$PIP_CONFIG" ;;
  "-m pip "*)
    echo "pip ${*:5}" >>"$CALLS"
    case "$*" in
      *" -e ."*) ;;
      *uv==*) fails pip-uv && exit 1; cp "$STUBS/uv" .venv/bin/uv ;;
      *torch==*) echo pip >.venv/cuda ;;
    esac ;;
  "-m compileall "*) echo "$7" >"$CALLS.skipped" ;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo "home = /" >"$3/pyvenv.cfg" ;;
  "-c import torch") ! fails torch-cpu || [ -e .venv/cuda ] ;;
esac
"""
UV = """#!/usr/bin/env bash
fails() { [[ " $FAILS " == *" $1 "* ]]; }
echo "uv ${*:2} backend=${UV_TORCH_BACKEND-}" >>"$CALLS"
env | grep -E '^(UV_|SSL_CERT_FILE)' | sort >"$CALLS.env"
case "$*" in
  *--dry-run*) if fails index-hangs; then exec sleep 600; fi; ! fails index ;;
  *-r*) ! fails uv-lock ;;
  *torch==*) fails uv-torch && exit 1; echo uv >.venv/cuda ;;
esac
"""

GET_UV = "pip install --no-deps --no-compile uv==0.13.8"
ASK = "uv install --dry-run --reinstall --no-deps torch==2.13.0 backend=cpu"
UV_LOCK = "uv install --no-deps -r requirements.lock backend="
UV_CUDA = "uv install -c requirements.lock torch==2.13.0 backend="
PIP_LOCK = "pip install --no-deps --no-compile -r requirements.lock"
PIP_CUDA = "pip install --no-compile -c requirements.lock torch==2.13.0"
OURS = "pip install --no-deps --no-build-isolation -e ."


@dataclass
class Checkout:
    """A copy of what scripts/setup reads. `fails`: what fails, as the programs above name it."""

    root: Path
    fails: str = ""
    pip_config: str = ""
    env: dict[str, str] = field(default_factory=dict)

    def setup(self) -> "subprocess.CompletedProcess[str]":
        """Runs it."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("UV_", "PIP_", "SSL_"))}
        stubs = {"STUBS": str(self.root / "stubs"), "PYTHON": str(self.root / "stubs" / "python")}
        told = {"CALLS": str(self.root / "calls"), "FAILS": self.fails, "PIP_CONFIG": self.pip_config}
        return subprocess.run(
            [self.root / "scripts" / "setup"],
            env={**inherited, **stubs, **told, **self.env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def calls(self) -> list[str]:
        """How pip and uv were called, in order."""
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """One without an environment."""
    for directory in ("scripts", "stubs"):
        (tmp_path / directory).mkdir()
    shutil.copy(SETUP, tmp_path / "scripts" / "setup")
    (tmp_path / "requirements.lock").write_text("\n".join(LOCK) + "\n")
    (tmp_path / "pyproject.toml").write_text("")
    for name, text in (("python", PYTHON), ("uv", UV)):
        (tmp_path / "stubs" / name).write_text(text)
        (tmp_path / "stubs" / name).chmod(0o755)
    return Checkout(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ("", [GET_UV, ASK, f"{UV_LOCK}cpu", OURS]),
        # Where no index has a CPU build; where one of pip's has, see the index that does not answer.
        ("index torch-cpu", [GET_UV, ASK, UV_LOCK, UV_CUDA, OURS]),
        ("index torch-cpu uv-torch", [GET_UV, ASK, UV_LOCK, UV_CUDA, PIP_CUDA, OURS]),
        ("uv-lock", [GET_UV, ASK, f"{UV_LOCK}cpu", PIP_LOCK, OURS]),
        ("pip-uv torch-cpu", [GET_UV, PIP_LOCK, PIP_CUDA, OURS]),
    ],
)
def test_torch_is_a_cpu_build_if_available_and_pip_replaces_uv_if_needed(
    checkout: Checkout, fails: str, calls: list[str]
) -> None:
    """The environment is ready at the end, and a second run finds it so."""
    checkout.fails = fails
    done = checkout.setup()
    assert done.returncode == 0, done.stdout + done.stderr
    assert checkout.calls == calls
    assert done.stdout.splitlines()[-1].endswith("done: .venv is ready")
    assert checkout.setup().stdout == ""
    assert checkout.calls == calls


@pytest.mark.slow
def test_an_index_that_does_not_answer_costs_seconds(checkout: Checkout) -> None:
    """As behind a firewall that drops what goes elsewhere."""
    checkout.fails = "index-hangs"
    started_at = time.monotonic()
    assert checkout.setup().returncode == 0
    assert time.monotonic() - started_at < 60
    assert checkout.calls == [GET_UV, ASK, UV_LOCK, OURS]


def test_the_tests_of_what_an_engine_imports_are_not_compiled(checkout: Checkout) -> None:
    """And nothing else is left out, wherever the checkout is."""
    assert checkout.setup().returncode == 0
    skipped = re.compile((checkout.root / "calls.skipped").read_text().strip())
    packages = "/home/test/testing/tests/genserve/.venv/lib/python3.11/site-packages"
    assert not skipped.search(f"{packages}/torch/nn/functional.py")
    assert skipped.search(f"{packages}/torch/testing/_comparison.py")
    assert skipped.search(f"{packages}/sympy/core/tests/test_basic.py")


def test_setup_uses_the_build_of_torch_that_uv_is_configured_for(checkout: Checkout) -> None:
    """uv's own variable."""
    checkout.env = {"UV_TORCH_BACKEND": "cu130"}
    assert checkout.setup().returncode == 0
    assert checkout.calls == [GET_UV, ASK.replace("cpu", "cu130"), f"{UV_LOCK}cu130", OURS]


def test_uv_is_told_what_pip_is_configured_with(checkout: Checkout) -> None:
    """The environment's word before that of pip's files; uv's own variables before both."""
    checkout.pip_config = (
        ":env:.index-url='https://mirror/simple'\\n"
        "global.index-url='https://old/simple'\\n"
        "global.extra-index-url='https://a/simple\\\\nhttps://b/simple'\\n"
        "global.find-links='/wheels /more'\\n"
        "global.cert='/ca.pem'\\n"
    )
    checkout.env = {"UV_HTTP_TIMEOUT": "7"}
    assert checkout.setup().returncode == 0
    told = dict(line.split("=", 1) for line in (checkout.root / "calls.env").read_text().splitlines())
    assert told == {
        "UV_DEFAULT_INDEX": "https://mirror/simple",
        "UV_INDEX": "https://a/simple https://b/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_HTTP_TIMEOUT": "7",
        "UV_NO_PROGRESS": "1",
        "UV_TORCH_BACKEND": "cpu",
    }


@pytest.mark.slow
def test_unimportable_torch_is_an_error_and_the_next_run_starts_over(checkout: Checkout) -> None:
    """With the last lines of the log; nothing half done passes for an environment."""
    checkout.fails = "index torch-cpu"
    unimportable = PYTHON.replace("|| [ -e .venv/cuda ]", "|| { echo 'no libcudart.so' >&2; exit 1; }")
    (checkout.root / "stubs" / "python").write_text(unimportable)
    done = checkout.setup()
    assert done.returncode == 1
    assert "FAILED" in done.stderr
    assert "no libcudart.so" in done.stderr
    (checkout.root / "stubs" / "python").write_text(PYTHON)
    assert checkout.setup().returncode == 0
