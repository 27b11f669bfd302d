"""Adapters that a fleet has loaded from directories, when others take their place."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from safetensors.torch import save_file

from genserve.client import AsyncClient
from genserve.config import ServeConfig
from genserve.errors import InvalidFieldError, LoraNotFoundError
from tests.fleet.routers import MAX_STAGING_BYTES, RoutedFleet, over, until_reached
from tests.support.breakable_link import BreakableLink
from tests.support.patience import until
from tests.support.pulled_peers import CHECKPOINT
from tests.support.refusals import refuses
from tests.support.scripted_adapter import CONFIG, TENSORS
from tests.support.scripted_daemon import Daemon, GeneratingEngine, serving
from tests.support.scripted_engine import Gate


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


async def test_an_adapter_that_is_unloaded_while_it_is_loaded_stays_away(tmp_path: Path) -> None:
    """The two calls take turns: one replica has loaded it already, and another one takes its time."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        gate = daemons[1].engine.gates["load_lora"] = Gate()
        async with over(daemons) as fleet:
            await fleet.until_ready()
            loading = asyncio.create_task(fleet.client.load_lora("poet", adapter(tmp_path)))
            await until(lambda: gate.reached.is_set() and "poet" in daemons[0].engine.loras.files)
            unloading = asyncio.create_task(fleet.client.unload_lora("poet"))
            await fleet.until_reported()
            assert "poet" in daemons[0].engine.loras.files
            gate.open.set()
            await loading
            await unloading
            await fleet.until_reported()
            assert not any("poet" in daemon.engine.loras.files for daemon in daemons)
            assert not fleet.running.router.fleet.desired.loras


async def test_an_adapter_that_is_unloaded_while_a_replica_gets_it_stays_away(tmp_path: Path) -> None:
    """The replica has just joined."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        gate = daemons[1].engine.gates["load_lora"] = Gate()
        async with over(daemons[:1]) as fleet:
            await fleet.until_ready(1)
            await fleet.client.load_lora("poet", adapter(tmp_path))
            await fleet.client.add_replica(daemons[1].address)
            await until_reached(gate)
            unloading = asyncio.create_task(fleet.client.unload_lora("poet"))
            await fleet.until_reported()
            gate.open.set()
            await unloading
            await fleet.until_reported()
            assert not any("poet" in daemon.engine.loras.files for daemon in daemons)


async def test_an_adapter_that_one_replica_lacks_is_unloaded_on_the_others(tmp_path: Path) -> None:
    """It is what the call is for; if nobody has it, the call says so."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over(daemons) as fleet:
            await fleet.until_ready()
            async with AsyncClient(daemons[1].address) as alone:
                await alone.load_lora("poet", adapter(tmp_path))
            assert (await fleet.client.unload_lora("poet")).name == "poet"
            with pytest.raises(LoraNotFoundError):
                await fleet.client.unload_lora("poet")


async def test_an_adapter_for_which_the_record_has_no_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a replica loads it. There is room when another one is unloaded."""
    monkeypatch.setattr("genserve.fleet.desired.MAX_LORAS_BYTES", 2 * len(str(tmp_path)) + 50)
    async with adapting() as daemon, over([daemon]) as fleet:
        await fleet.until_ready()
        path = adapter(tmp_path)
        await fleet.client.load_lora("a", path)
        await fleet.client.load_lora("b", path)
        with refuses(InvalidFieldError, field="path", says="unload"):
            await fleet.client.load_lora("c", path)
        assert "c" not in daemon.engine.loras.files
        await fleet.client.load_lora("b", path)
        await fleet.client.unload_lora("a")
        await fleet.client.load_lora("c", path)


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
