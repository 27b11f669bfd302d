"""A trainer in a process of its own, so that what it computes does not delay those who measure streams.

The program obeys lines of JSON; its moments are of the machine's monotonic clock, the same for all processes.
"""

import sys
import time
from pathlib import Path
from typing import Any

from bench.processes import Program, obey
from genserve.client import AsyncClient, PushResult
from genserve.wire.literals import KvPolicy, PrepareMode
from tests.support import models


async def start(name: str, address: str, directory: Path) -> Program:
    """A trainer for the daemon at `address`."""
    program = Program.of_module(f"trainer of {name}", __name__, address, log=directory / f"trainer-{name}.log")
    return await program.wait_ready()


class Trainer:
    """What it can be told to do. The tensors are in its memory, as a trainer's are."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._tensors: dict[str, Any] = {}

    async def carry_out(self, do: str, weights: str, **options: Any) -> dict[str, float]:
        """`do` names a method. `load` has tensors in memory, and no more: those of `weights` and of the `others`."""
        if do == "load":
            self._load(weights, *options["others"])
            return {}
        if weights not in self._tensors:
            self._load(weights)
        version = (await self._client.get_weights()).weight_version + 1
        answer: dict[str, float] = await getattr(self, do)(self._tensors[weights], version, **options)
        return answer

    def _load(self, *checkpoints: str) -> None:
        if set(checkpoints) != set(self._tensors):
            self._tensors = {}
            self._tensors = {each: models.load_tensors(Path(each)) for each in checkpoints}

    async def push(
        self,
        tensors: Any,
        version: int,
        kv_policy: KvPolicy | None = None,
        prepare_mode: PrepareMode | None = None,
    ) -> dict[str, float]:
        """A whole update."""
        began_at = time.monotonic()
        result = await self._client.push_weights(
            tensors, version=version, kv_policy=kv_policy, prepare_mode=prepare_mode
        )
        return {"total_s": time.monotonic() - began_at, "began_at": began_at, **_steps(result)}

    async def commit(self, tensors: Any, version: int) -> dict[str, float]:
        """Stages first; then an update whose bytes are there: verify, prepare, pause, commit, resume."""
        staged = await self._client.push_weights(tensors, version=version, action="stage")
        began_at = time.monotonic()
        result = await self._client.commit_push(staged.push.push_id)
        return {"began_at": began_at, **_steps(result)}

    async def stage(
        self, tensors: Any, version: int, streams: int, shared_memory: bool, seconds: float
    ) -> dict[str, float]:
        """Stages and discards, again and again, for so long."""
        began_at = time.monotonic()
        num_bytes = 0
        while time.monotonic() < began_at + seconds:
            staged = await self._client.push_weights(
                tensors, version=version, action="stage", streams=streams, shared_memory=shared_memory
            )
            await self._client.discard_push(staged.push.push_id)
            num_bytes += staged.push.total_bytes
        ended_at = time.monotonic()
        return {"began_at": began_at, "ended_at": ended_at, "gb_per_s": num_bytes / 1e9 / (ended_at - began_at)}


def _steps(result: PushResult) -> dict[str, float]:
    assert result.applied is not None
    steps = {f"{step}_s": duration_s for step, duration_s in result.applied.step_s.items()}
    return {"paused_s": result.applied.paused_s, **steps}


async def main(address: str) -> None:
    """Obeys."""
    async with AsyncClient(address) as client:
        await obey(Trainer(client).carry_out)


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(sys.argv[1]))
