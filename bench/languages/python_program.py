"""The Python client on a load: `python -m bench.languages.python_program ADDRESS` obeys lines of JSON.

clients/typescript/bench/program.ts does the same with the TypeScript client.
"""

import asyncio
import sys
import time
from typing import Any

import uvloop

from bench.processes import obey
from genserve.client import AsyncClient


class Load:
    """What the client is ordered to do, and what it took: seconds, and CPU seconds of this process."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._tensors: Any = {}

    async def carry_out(self, do: str, **order: Any) -> dict[str, float]:
        """One order."""
        match do:
            case "generate":
                return await self._timed(self._generate(**order))
            case "pull":
                pulled = await self._client.pull_weights()
                self._tensors = pulled.tensors
                return {"bytes": pulled.total_bytes}
            case "push":
                return await self._push(**order)
            case _:
                raise ValueError(f"unknown order {do!r}")

    async def _timed(self, work: Any) -> dict[str, float]:
        began_s, cpu_began_s = time.monotonic(), time.process_time()
        told = await work
        return {**told, "seconds": time.monotonic() - began_s, "cpu_s": time.process_time() - cpu_began_s}

    async def _generate(self, many: bool, concurrency: int, requests: int, max_tokens: int) -> dict[str, float]:
        options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0, "text": False}
        prompts = [[1 + number % 500, 7, 3] for number in range(requests)]
        count = 0
        if many:
            for first in range(0, requests, concurrency):
                part = prompts[first : first + concurrency]
                generations = await self._client.generate_many(part, stream_interval=1, **options)
                count += sum(len(each.token_ids) for each in generations)
            return {"tokens": count}
        left = iter(prompts)

        async def slot() -> None:
            nonlocal count
            for prompt in left:
                async with self._client.stream(prompt, **options) as deltas:
                    async for delta in deltas:
                        count += sum(len(output.token_ids) for output in delta.outputs)

        async with asyncio.TaskGroup() as slots:
            for _ in range(concurrency):
                slots.create_task(slot())
        return {"tokens": count}

    async def _push(self, one_connection: bool) -> dict[str, float]:
        """Staged, which is what is timed; then committed."""
        version = (await self._client.get_weights()).weight_version + 1
        options: dict[str, Any] = {"streams": 1, "shared_memory": False} if one_connection else {}
        push_id = f"python-{version}"

        async def stage() -> dict[str, float]:
            await self._client.push_weights(self._tensors, version=version, push_id=push_id, action="stage", **options)
            return {}

        told = await self._timed(stage())
        await self._client.commit_push(push_id)
        return told


async def main() -> None:
    """Until stdin ends."""
    async with AsyncClient(sys.argv[1]) as client:
        await obey(Load(client).carry_out)


if __name__ == "__main__":
    uvloop.run(main())
