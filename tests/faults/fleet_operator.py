"""Pauses, sleeps and adapters in the history of a fleet: one call after the other."""

import random
from contextlib import AsyncExitStack
from typing import Any

from genserve.client import AsyncClient
from genserve.errors import GenserveError
from tests.faults.fleet_states import all_ready
from tests.faults.fleet_work import FleetWork, deck
from tests.support.adapters import CONFIG
from tests.support.patience import slow

PUSHED, LOADED = "pushed", "loaded"
"""Names of adapters: what is pushed has versions, what is loaded from a directory is always the same."""
_KINDS = {"pause": 3, "sleep": 2, "push_lora": 3, "load_lora": 1, "unload pushed": 1, "unload loaded": 1}
_SLEEPS: list[dict[str, Any]] = [{"level": 0}, {"level": 1}, {"level": 2}, {"tags": ["kv_cache"]}]


class FleetOperator:
    """`adapter`: the directory of one, and its name among the contents."""

    def __init__(self, work: FleetWork, name: str, rng: random.Random, adapter: tuple[str, str]) -> None:
        self._work = work
        self._name = name
        self._rng = rng
        self._kinds = deck(rng, _KINDS)
        self._directory, self._adapter = adapter
        self._lora_version = 0
        self._may_sleep = False

    async def step(self, client: AsyncClient) -> None:
        """One of what it does."""
        await slow(self._rng.uniform(0.3, 2.0))
        await self._wake(client)  # if it was interrupted
        match next(self._kinds):
            case "pause":
                await self._pause(client)
            case "sleep":
                await self._sleep(client)
            case kind:
                await self._adapt(client, kind)

    async def _pause(self, client: AsyncClient) -> None:
        ttl_s = self._rng.uniform(0.3, 2.0)
        call = client.pause(ttl_s=ttl_s, timeout_s=20)
        paused = await self._work.recorder.call(call, "pause", self._name, ttl_s=ttl_s)
        if paused is None or self._rng.random() < 0.3:
            return
        await slow(self._rng.uniform(0, ttl_s / 2))
        lease_id = paused.lease.lease_id
        await self._work.recorder.call(client.resume(lease_id), "resume", self._name, lease_id=lease_id)

    async def _sleep(self, client: AsyncClient) -> None:
        self._may_sleep = True
        options = self._rng.choice(_SLEEPS)
        await self._work.recorder.call(client.sleep(timeout_s=20, **options), "sleep", self._name)
        await slow(self._rng.uniform(0.5, 5.0))
        # Of a sleep that left all memory awake any wake-up is the end.
        if options.get("level") != 0 and self._rng.random() < 0.5:
            await self._work.recorder.call(client.wake_up(["weights"], timeout_s=60), "wake weights", self._name)
            await slow(self._rng.uniform(0.5, 2.0))
        await self._wake(client)

    async def _wake(self, client: AsyncClient) -> None:
        while self._may_sleep:
            if await self._work.recorder.call(client.wake_up(timeout_s=60), "wake", self._name) is not None:
                self._may_sleep = False
            else:
                await slow(0.2)

    async def _adapt(self, client: AsyncClient, kind: str) -> None:
        """Half of the time nothing happens to processes meanwhile, and if all replicas are there, the adapter is on all
        of them afterwards, or on none."""
        async with AsyncExitStack() as stack:
            is_calm = self._rng.random() < 0.5
            if is_calm:
                await stack.enter_async_context(self._work.calm)
            were_there = is_calm and await _all_there(client)
            await self._change(client, kind)
            if were_there and await _all_there(client):
                last = next(each for each in reversed(self._work.recorder.history.operations) if each.lora_name)
                last.is_everywhere = True

    async def _change(self, client: AsyncClient, kind: str) -> None:
        work, fields = self._work, dict[str, Any]()
        match kind:
            case "push_lora":
                self._lora_version += self._rng.randrange(1, 3)
                adapter = self._rng.choice(sorted(set(work.recorder.contents.adapters) - {self._adapter}))
                fields = {"lora_name": PUSHED, "lora_version": self._lora_version, "adapter": adapter}
                tensors, version = work.recorder.contents.adapters[adapter], self._lora_version
                call: Any = client.push_lora(PUSHED, tensors, CONFIG, version=version, timeout_s=30)
            case "load_lora":
                fields = {"lora_name": LOADED, "adapter": self._adapter}
                call = client.load_lora(LOADED, self._directory, timeout_s=30)
            case _:
                name = kind.removeprefix("unload ")
                kind, fields = "unload_lora", {"lora_name": name}
                call = client.unload_lora(name, timeout_s=30)
        if await work.recorder.call(call, kind, self._name, **fields) is not None and kind != "unload_lora":
            work.adapters.add(fields["lora_name"])


async def _all_there(client: AsyncClient) -> bool:
    try:
        return all_ready(await client.list_replicas(timeout_s=5))
    except GenserveError:
        return False
