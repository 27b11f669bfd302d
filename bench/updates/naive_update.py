"""Weight updates as they are done without genserve: bench.updates.naive_engine as a process."""

from collections.abc import Sequence
from pathlib import Path

from bench import engines
from bench.processes import Program


async def start(checkpoint: Path, directory: Path, flags: Sequence[str] = ()) -> Program:
    """A plain AsyncLLM that takes new weights in two ways; `flags` are further ones of vLLM."""
    log = directory / "naive_engine.log"
    program = Program.of_module(
        "naive_engine", "bench.updates.naive_engine", str(checkpoint), *flags, log=log, env=engines.ENVIRONMENT
    )
    return await program.wait_ready()


class NaiveUpdate:
    """The whole update, in one of the ways, while nothing is generated."""

    def __init__(self, program: Program, way: str, checkpoint: Path) -> None:
        self._program = program
        self._way = way
        self._checkpoint = checkpoint

    async def move(self) -> float:
        """Updates."""
        measured = await self._program.order(do="update", way=self._way, weights=str(self._checkpoint), streams=0)
        total_s: float = measured["total_s"]
        return total_s

    async def stop(self) -> None:
        """Ends nothing: the program is the caller's."""
