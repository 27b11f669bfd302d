"""Adapters that a fleet has loaded from directories, when others take their place."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors.torch import save_file

from genserve.config import ServeConfig
from tests.fleet.routers import MAX_STAGING_BYTES, RoutedFleet, over
from tests.support.breakable_link import BreakableLink
from tests.support.patience import until
from tests.support.pulled_peers import CHECKPOINT
from tests.support.scripted_adapter import CONFIG, TENSORS
from tests.support.scripted_daemon import Daemon, GeneratingEngine, serving


async def test_a_pushed_adapter_is_not_replaced_from_a_directory(tmp_path: Path) -> None:
    """What LoadLora had loaded under its name before is out of date."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over(daemons[:1]) as fleet:
            await fleet.until_ready(1)
            await fleet.client.load_lora("poet", adapter(tmp_path))
            await fleet.client.push_lora("poet", TENSORS, CONFIG, version=5)
            fleet.running.router.add(daemons[1].address)
            await fleet.until_ready(2)
            await until(lambda: all(each.lora_names is not None for each in fleet.running.router.fleet.members))
            await fleet.until_reported()
            assert "poet" not in daemons[1].engine.loras.files


async def test_an_adapter_that_is_being_unloaded_is_not_loaded_again(tmp_path: Path) -> None:
    """One replica has done it, and another one takes its time."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        link = await stack.enter_async_context(BreakableLink(daemons[1].address))
        async with over(daemons[:1]) as fleet:
            fleet.running.router.add(link.address)
            await fleet.until_ready(2)
            await fleet.client.load_lora("poet", adapter(tmp_path))
            members = fleet.running.router.fleet.members
            await until(lambda: all(each.lora_names == {"poet"} for each in members))
            link.silence()
            unloading = asyncio.create_task(fleet.client.unload_lora("poet"))
            one = fleet.running.router.find(daemons[0].address).member
            await until(lambda: one.lora_names != {"poet"})
            fleet.running.router.fleet.refresh()
            await until_reported_by(fleet, daemons[0].address)
            link.let_go()
            await unloading
            await until(lambda: "poet" not in daemons[0].engine.loras.files)
            assert not any("poet" in daemon.engine.loras.files for daemon in daemons)


async def until_reported_by(fleet: RoutedFleet, address: str) -> None:
    """Waits until a replica has told its state, which it does often."""
    member = fleet.running.router.find(address).member
    for _ in range(3):
        before = member.engine
        await until(lambda before=before: member.engine is not before)  # type: ignore[misc]


def adapter(directory: Path) -> str:
    """An adapter in a directory."""
    save_file(TENSORS, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": ["q"]}))
    return str(directory)


@asynccontextmanager
async def adapting() -> AsyncIterator[Daemon]:
    """A replica that takes adapters, and says so."""
    engine = GeneratingEngine()
    engine.max_loras = 4
    settings: Any = {"checkpoint": CHECKPOINT, "max_staging_bytes": MAX_STAGING_BYTES, "instance_id": uuid4().hex}
    async with serving(ServeConfig(port=0), engine=engine, **settings) as daemon:
        yield daemon
