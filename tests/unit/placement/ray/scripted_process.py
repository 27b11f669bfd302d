"""A program in the place of the process that talks to Ray: it says what a test has written for it."""

import os
from pathlib import Path

import pytest

_PROGRAM = """
import os, signal, sys, time
from pathlib import Path

lives = Path(__file__).with_name("lives")
with lives.open("a") as file:
    file.write(sys.argv[1] + "\\n")
said = Path(__file__).with_name(f"says.{len(lives.read_text().splitlines())}")
lines, status = said.read_text().rsplit("\\n", 1)
if lines:
    print(lines, flush=True)
while status == "":
    time.sleep(600)
sys.exit(int(status))
"""


class ScriptedProcess:
    """`says`: the lines of each life, and the exit status; None: it waits for a signal."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._package = directory / "genserve" / "placement" / "ray"
        self._package.mkdir(parents=True)
        for each in (self._package, *list(self._package.parents)[:2]):
            (each / "__init__.py").touch()
        (self._package / "__main__.py").write_text(_PROGRAM)
        monkeypatch.setenv("PYTHONPATH", os.fspath(directory))
        monkeypatch.setenv("PYTHONSAFEPATH", "1")

    def says(self, life: int, lines: list[str], status: int | None) -> None:
        """In its so many-th life, the first being 1."""
        text = "\n".join(lines) + "\n" + ("" if status is None else str(status))
        (self._package / f"says.{life}").write_text(text)

    @property
    def is_running(self) -> bool:
        """Whether it was started, and has not ended at once."""
        lives = self._package / "lives"
        return lives.exists() and lives.stat().st_size > 0  # what is ended before counts as no life

    @property
    def tasks(self) -> list[str]:
        """What it was told to do, in each life."""
        return (self._package / "lives").read_text().splitlines()
