"""Environments of any Python that this machine has, with nothing but what a test installs, from PyPI alone."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest
from uv import find_uv_bin

UNREACHABLE: Final = (
    "Failed to establish a new connection|NewConnectionError|No route to host|Name or service|tcp connect error"
)
"""What pip and uv say where there is no network."""
_SETTINGS: Final = {"index-url": ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), "cert": ("PIP_CERT", "SSL_CERT_FILE")}


def python_of(version: str) -> str:
    """A program of this Python: of the PATH, of uv or of pyenv. Skips where none makes environments."""
    pyenv = map(str, Path.home().glob(".pyenv/versions/*/bin"))  # whose shims are no programs of a version
    path = os.pathsep.join([os.environ["PATH"], *pyenv])
    find = [find_uv_bin(), "python", "find", "--system", "--no-project", "--no-python-downloads", version]
    found = subprocess.run(find, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"this machine has no Python {version}")
    python = found.stdout.strip()
    if subprocess.run([python, "-c", "import ensurepip"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"Python {version} of this machine ({python}) makes no environments")
    return python


def plain_variables() -> dict[str, str]:
    """Those of this process, without what leads to packages elsewhere."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV", "VLLM_"))}


def pypi_alone() -> dict[str, str]:
    """An environment in which pip and uv have the index of pip's configuration, which may be a mirror, and no other."""
    listed = [sys.executable, "-m", "pip", "config", "list"]
    configured = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    alone = {key: value for key, value in plain_variables().items() if not key.startswith(("PIP_", "UV_"))}
    alone |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_NO_CONFIG": "1"}
    alone["UV_PYTHON_DOWNLOADS"] = "never"
    for setting, names in _SETTINGS.items():
        values = re.findall(rf"^\S+\.{setting}='(.*)'$", configured, re.MULTILINE)  # the environment's comes first
        alone |= {name: values[0] for name in names if values}
    return alone


@contextmanager
def bare_environment(version: str) -> Iterator[Path]:
    """The directory of the programs of an environment without packages."""
    python = python_of(version)
    with TemporaryDirectory() as directory:  # not of pytest, which looks for secrets in what tests leave
        subprocess.run([python, "-m", "venv", directory], check=True, timeout=120)
        yield Path(directory) / "bin"


def install(programs: Path, *packages: str, oldest: bool = False) -> None:
    """Installs the newest versions, by pip, or the oldest ones that have wheels for this Python, by uv. Skips where
    there is no network."""
    command: Sequence[str] = [str(programs / "pip"), "install"]
    if oldest:
        command = [find_uv_bin(), "pip", "install", "--python", str(programs / "python"), "--resolution", "lowest"]
    command = [*command, "--quiet", "--only-binary", ":all:", *packages]
    done = subprocess.run(command, env=pypi_alone(), capture_output=True, text=True, check=False, timeout=600)
    if re.search(UNREACHABLE, done.stderr):
        pytest.skip("there is no network, or no index in it")
    assert done.returncode == 0, done.stderr
