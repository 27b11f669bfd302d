"""An environment with TRL's released package.

TRL and what it needs beside our lock are installed into it; torch, transformers and vLLM are those of the environment
that the tests run in. It is kept inside that one until requirements.txt changes.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_DIRECTORY = Path(sys.prefix) / "trl"
_INSTALL_TIMEOUT_S = 240.0
_INSTALL = ("install", "--disable-pip-version-check", "--no-input", "--quiet", "--timeout", "20", "--retries", "2")


class TrlNotInstalledError(Exception):
    """TRL could not be installed; the text is pip's."""


def run(program: str, timeout_s: float, arguments: Sequence[str] = ()) -> "subprocess.CompletedProcess[str]":
    """Runs Python source in the environment. Raises TrlNotInstalledError."""
    command = [str(_python()), "-c", program, *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


def _python() -> Path:
    """The environment's interpreter. Makes the environment where there is none for these requirements."""
    python, installed = _DIRECTORY / "bin" / "python", _DIRECTORY / "requirements.txt"
    wanted = _REQUIREMENTS.read_text()
    if installed.is_file() and installed.read_text() == wanted:
        return python
    venv.create(_DIRECTORY, clear=True, symlinks=True, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(_DIRECTORY)}))
    (packages / "engine.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), *_INSTALL, "--no-deps", "-r", str(_REQUIREMENTS)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise TrlNotInstalledError(
            f"pip could not install {_REQUIREMENTS.name} into {_DIRECTORY}:\n{done.stderr[-2000:]}"
        )
    installed.write_text(wanted)
    return python
