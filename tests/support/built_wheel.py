"""The wheel of genserve, out of a copy of the files that git knows, with the build backend of this environment."""

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


def build_wheel(directory: Path) -> Path:
    """Builds the wheel below `directory`, which is empty."""
    source, built = directory / "source", directory / "built"
    built.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "pyproject.toml", "README.md", "LICENSE",
         "genserve"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in listed:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    program = f"from setuptools.build_meta import build_wheel; build_wheel({str(built)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, check=True, timeout=120)
    (wheel,) = built.glob("*.whl")
    return wheel
