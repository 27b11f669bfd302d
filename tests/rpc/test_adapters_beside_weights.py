"""Pushes of adapters beside pushes of weights, and of other adapters, on one daemon."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from genserve.client import AsyncClient
from genserve.errors import ApplyInProgressError
from genserve.settings.config import ServeConfig
from tests.support.patience import until
from tests.support.pulled_peers import CHECKPOINT, TOTAL_BYTES, content, weights
from tests.support.refusals import refuses
from tests.support.scripted_adapter import CONFIG, TENSORS
from tests.support.scripted_daemon import Daemon, GeneratingEngine, serving
from tests.support.scripted_engine import Gate

MAX_STAGING_BYTES = 1 << 30


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    """One that takes weights and adapters."""
    engine = GeneratingEngine()
    engine.max_loras = 4
    async with serving(
        ServeConfig(port=0), engine=engine, checkpoint=CHECKPOINT, max_staging_bytes=MAX_STAGING_BYTES
    ) as running:
        yield running


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.address) as connected:
        yield connected


async def busy(daemon: Daemon, push_id: str) -> None:
    """All bytes of a push have arrived, and it is carried out."""
    await until(lambda: push_id in daemon.registry.live and daemon.registry.live[push_id].lifecycle.is_busy)


@pytest.mark.parametrize("step", ["prepare_weights", "commit_weights"])
async def test_an_adapter_is_pushed_while_weights_are(daemon: Daemon, client: AsyncClient, step: str) -> None:
    """It is loaded before them, or after their exchange."""
    gate = daemon.engine.gates[step] = Gate()
    pushing = asyncio.create_task(client.push_weights(weights(1), version=1, push_id="w"))
    await gate.reached.wait()
    adapter = asyncio.create_task(client.push_lora("poet", TENSORS, CONFIG, push_id="a"))
    if step == "prepare_weights":
        await adapter
    else:
        await busy(daemon, "a")
    gate.open.set()
    await asyncio.gather(pushing, adapter)
    assert daemon.engine.live == content(1) and "poet" in daemon.engine.loras.files
    assert not daemon.engine.misuses


async def test_a_version_that_is_live_is_not_counted_twice(daemon: Daemon, client: AsyncClient) -> None:
    """Its engine is yet to go on: it is both what is served and a push that is carried out."""
    gate = daemon.engine.gates["resume"] = Gate()
    pushing = asyncio.create_task(client.push_weights(weights(1), version=1))
    await gate.reached.wait()
    assert daemon.registry.room_bytes == MAX_STAGING_BYTES - TOTAL_BYTES
    gate.open.set()
    await pushing
    assert daemon.registry.room_bytes == MAX_STAGING_BYTES - TOTAL_BYTES


@pytest.mark.parametrize("action", ["apply", "prepare"])
async def test_weights_are_pushed_while_an_adapter_is_loaded(daemon: Daemon, client: AsyncClient, action: Any) -> None:
    """They arrive and are prepared meanwhile, and exchanged afterwards, whether at once or by a commit."""
    gate = daemon.engine.gates["load_lora"] = Gate()
    adapter = asyncio.create_task(client.push_lora("poet", TENSORS, CONFIG))
    await gate.reached.wait()
    pushing = asyncio.create_task(client.push_weights(weights(1), version=1, push_id="w", action=action))
    if action == "prepare":
        await pushing
        pushing = asyncio.create_task(client.commit_push("w"))
    await busy(daemon, "w")
    with refuses(ApplyInProgressError) as refused:
        await client.push_weights(weights(2), version=2)
    assert refused.value.metadata == {"push_id": "w"}
    gate.open.set()
    await asyncio.gather(pushing, adapter)
    assert daemon.engine.live == content(1) and "poet" in daemon.engine.loras.files
    assert not daemon.engine.misuses


@pytest.mark.parametrize("name", ["poet", "cook"])
async def test_adapters_are_pushed_at_once(daemon: Daemon, client: AsyncClient, name: str) -> None:
    """Under two names, or one after the other under one: the higher version stays."""
    gate = daemon.engine.gates["load_lora"] = Gate()
    first = asyncio.create_task(client.push_lora("poet", TENSORS, CONFIG, version=1))
    await gate.reached.wait()
    second = asyncio.create_task(client.push_lora(name, TENSORS, CONFIG, version=2, push_id="second"))
    await busy(daemon, "second")
    gate.open.set()
    await asyncio.gather(first, second)
    versions = {lora.name: lora.version for lora in await client.list_loras()}
    assert versions == {"poet": 1} | {name: 2}
