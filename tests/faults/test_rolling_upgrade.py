"""The commands of "A rolling upgrade" in docs/fleet.md, under load: no token and no version is lost."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from genserve.cli import main
from genserve.client import AsyncClient
from tests.faults.fleet_processes import FleetProcesses
from tests.faults.fleet_states import all_ready, until
from tests.support import adapters
from tests.support.patience import slow

pytestmark = pytest.mark.long("genserve/fleet", "genserve/control", "genserve/cli")
NUM_REPLICAS, NUM_CLIENTS, NUM_TOKENS = 4, 3, 120
PROMPT = [5, 6, 7]


class Load:
    """Clients that stream, and a trainer that pushes, both through the router until they are stopped."""

    def __init__(self, address: str, checkpoints: list[Path]) -> None:
        self._address = address
        self._checkpoints = checkpoints
        self.version = 0
        """That was pushed last."""
        self.num_streams = 0
        self._is_over = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """What goes wrong is raised at the end of the block; what has begun ends before."""
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(self._stream(number))
            group.create_task(self._push())
            try:
                yield
            finally:
                self._is_over.set()

    async def _stream(self, number: int) -> None:
        async with AsyncClient(self._address) as client:
            while not self._is_over.is_set():
                await slow(0.5)
                least = self.version
                tokens, versions = [], []
                options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "resume": True, "text": False}
                async for delta in client.stream([*PROMPT, number], timeout_s=120, **options):
                    for output in delta.outputs:
                        tokens += output.token_ids
                        versions += [span.version for span in output.weight_spans for _ in range(span.start, span.end)]
                assert len(tokens) == len(versions) == NUM_TOKENS
                assert versions == sorted(versions) and versions[0] >= least
                self.num_streams += 1

    async def _push(self) -> None:
        async with AsyncClient(self._address) as client:
            while not self._is_over.is_set():
                await slow(1.0)
                checkpoint = self._checkpoints[self.version % len(self._checkpoints)]
                await client.push_weights(checkpoint, version=self.version + 1, timeout_s=120)
                self.version += 1


async def command(*arguments: str) -> None:
    """A command of genserve succeeds."""
    assert await asyncio.to_thread(main, [*arguments]) == 0, arguments


@pytest.mark.timeout(900)
async def test_four_replicas_are_upgraded_one_by_one_under_load(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Each is taken out, ends, is started anew and added again, while streams run and versions are pushed. An adapter
    that was pushed before is there at the end, too."""
    flags = ["--enable-lora", "--max-lora-rank", "8"]
    with FleetProcesses(checkpoints["a"], tmp_path, NUM_REPLICAS, ["--silence", "20s"], flags).running() as fleet:
        router = ("--target", fleet.router_address)
        load = Load(fleet.router_address, [checkpoints["b"], checkpoints["a"]])
        async with AsyncClient(fleet.router_address) as client:
            await until(client, all_ready)
            await client.push_lora("poet", adapters.adapter(checkpoints["a"], seed=1), adapters.CONFIG, version=3)
            async with load.running():
                for index, address in enumerate(fleet.addresses):
                    began_s, before = time.monotonic(), (load.num_streams, load.version)
                    await command("replicas", "drain", address, *router)
                    await command("drain", "--target", address)
                    assert await asyncio.to_thread(fleet.daemons[index].exit_status, 60) == 0
                    fleet.restart(index)
                    await command("replicas", "add", address, *router)
                    await command("replicas", "wait", str(NUM_REPLICAS), "--timeout", "5m", *router)
                    took_s, streams = time.monotonic() - began_s, load.num_streams - before[0]
                    print(f"{address}: {took_s:.1f} s, {streams} streams, {load.version - before[1]} pushes")
            listed = await until(client, lambda told: not any(each.reason for each in told.replicas))
            assert all_ready(listed) and len(listed.replicas) == NUM_REPLICAS
        answers = []
        options: Any = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}
        for address in fleet.addresses:
            async with AsyncClient(address) as client:
                assert (await client.status()).state.weight_version == load.version > NUM_REPLICAS
                said = [await client.generate(PROMPT, lora_name=name, **options) for name in (None, "poet")]
                assert {each.lora_version for each in said[1].sequences[0].weight_spans} == {3}
                answers.append([each.token_ids for each in said])
        assert answers == [answers[0]] * NUM_REPLICAS
