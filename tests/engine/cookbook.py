"""The recipes of docs/cookbook.md, as they stand, in a shell that has the function that the page defines."""

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.examples import WRITTEN_ADDRESS

PAGE = Path(__file__).parents[2] / "docs" / "cookbook.md"
BLOCKS = re.findall(r"<!-- executed by (\S+) -->\n```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)


@dataclass(frozen=True)
class Shell:
    """Bash in a directory, where the page's address is another one. `call` is one of the page's definitions of it."""

    call: str
    address: str
    directory: Path

    async def run(self, recipe: str, **variables: str | int) -> "subprocess.CompletedProcess[str]":
        """Runs a recipe."""
        return await asyncio.to_thread(self._run, recipe, {name: str(value) for name, value in variables.items()})

    async def asked(self, recipe: str, **variables: str | int) -> Any:
        """The JSON that a recipe prints, with the names of the proto files: grpcurl prints those, and buf JSON's."""
        done = await self.run(recipe, **variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout, object_hook=_as_in_proto_files)

    def _run(self, recipe: str, variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
        script = f"{self.call}\n{recipe}".replace(WRITTEN_ADDRESS, self.address)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", script], cwd=self.directory, env={**os.environ, **variables, "PATH": path},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip


def _as_in_proto_files(message: dict[str, Any]) -> dict[str, Any]:
    return {re.sub("[A-Z]", lambda found: "_" + found[0].lower(), name): value for name, value in message.items()}


def recipe(*words: str) -> str:
    """The one recipe that has these words."""
    (found,) = (text for _, text in BLOCKS if all(word in text for word in words))
    return str(found)


def definitions(test_file: str) -> dict[str, str]:
    """The definitions of `call` that a test file runs, by the program that they use."""
    mine = [text for name, text in BLOCKS if Path(name).name == test_file and text.startswith("call() ")]
    return {"grpcurl" if "grpcurl" in text else "buf": text for text in mine}
