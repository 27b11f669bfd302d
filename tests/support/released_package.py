"""An environment with a released package of a trainer.

The package and what it needs beside our lock are installed into it; torch, transformers and vLLM are those of the
environment that the tests run in. It is kept inside that one until its requirements change.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_INSTALL_TIMEOUT_S = 240.0
_INSTALL = ("install", "--disable-pip-version-check", "--no-input", "--quiet", "--timeout", "20", "--retries", "2")

NO_WARNINGS = pytest.mark.filterwarnings("ignore")
"""Of a test that imports a package: pytest-xdist tells warnings to a process that cannot import their classes."""


class PackageNotInstalledError(Exception):
    """The package could not be installed; the text is pip's."""


@dataclass(frozen=True)
class ReleasedPackage:
    """`name`: of the directory below tests/ that has its requirements.txt and programs, and of the environment."""

    name: str

    def program(self, name: str) -> str:
        """The source of a program that is run in the environment."""
        return (ROOT / "tests" / self.name / name).read_text()

    def run(
        self, program: str, timeout_s: float, arguments: Sequence[str] = (), cwd: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Runs Python source in the environment. Raises PackageNotInstalledError."""
        command = [str(self.python()), "-c", program, *arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)

    def imported(self) -> Any:
        """The package, in this process. Raises PackageNotInstalledError."""
        packages = str(_packages(self.python().parents[1]))
        if packages not in sys.path:
            sys.path.append(packages)
        return import_module(self.name)

    def python(self) -> Path:
        """The environment's interpreter. Makes the environment where there is none for these requirements. Raises
        PackageNotInstalledError."""
        directory, requirements = Path(sys.prefix) / self.name, ROOT / "tests" / self.name / "requirements.txt"
        python, installed = directory / "bin" / "python", directory / "requirements.txt"
        wanted = requirements.read_text()
        if installed.is_file() and installed.read_text() == wanted:
            return python
        venv.create(directory, clear=True, symlinks=True, with_pip=False)
        (_packages(directory) / "engine.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), *_INSTALL, "--no-deps", "-r", str(requirements)]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise PackageNotInstalledError(f"pip could not install {requirements}:\n{done.stderr[-2000:]}")
        installed.write_text(wanted)
        return python


def _packages(directory: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(directory)}))
