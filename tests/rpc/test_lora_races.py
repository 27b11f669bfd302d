"""An adapter that is loaded while another one is checked: no two adapters of one name have one version."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from genserve.client import AsyncClient
from genserve.errors import InvalidFieldError, VersionNotNewerError, WeightVersionMismatchError
from genserve.weights.push.types import MAX_VERSION
from tests.support.patience import turns, until
from tests.support.scripted_adapter import CONFIG, TENSORS
from tests.support.scripted_daemon import Daemon
from tests.support.scripted_engine import Gate


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[AsyncClient]:
    """One of a daemon that has adapter "x" in version 1, and holds up whatever is loaded next."""
    daemon.engine.max_loras = 4
    async with AsyncClient(daemon.address) as connected:
        await connected.push_lora("x", TENSORS, CONFIG, version=1)
        daemon.engine.gates["load_lora"] = Gate()
        yield connected
        daemon.engine.loras.unload("x")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory as PEFT writes it."""
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": ["q"]}))
    return tmp_path


async def test_a_push_is_compared_with_what_was_loaded_while_it_waited(
    daemon: Daemon, client: AsyncClient, saved: Path
) -> None:
    """Both would be version 2, and `expected_version` would not have been the one that was replaced."""
    gate = daemon.engine.gates["load_lora"]
    loading = asyncio.ensure_future(client.load_lora("x", saved))
    await gate.reached.wait()
    pushing = asyncio.ensure_future(client.push_lora("x", TENSORS, CONFIG, version=2, expected_version=1, push_id="p"))
    await until(lambda: any(push.lifecycle.is_busy for push in daemon.registry.live.values()))
    await turns()  # until it waits for its own
    gate.open.set()
    assert (await loading).version == 2
    with pytest.raises((VersionNotNewerError, WeightVersionMismatchError)):
        await pushing
    assert [lora.source for lora in await client.list_loras()] == [str(saved)]


async def test_no_version_follows_the_last_one(daemon: Daemon, client: AsyncClient, saved: Path) -> None:
    """Also where it is the last one only since the call waits: no message could tell the next one."""
    gate = daemon.engine.gates["load_lora"]
    pushing = asyncio.ensure_future(client.push_lora("x", TENSORS, CONFIG, version=MAX_VERSION))
    await gate.reached.wait()
    loading = asyncio.ensure_future(client.load_lora("x", saved))
    await client.status()  # which was sent later
    await turns()
    gate.open.set()
    await pushing
    with pytest.raises(InvalidFieldError):
        await loading
    assert [lora.version for lora in await client.list_loras()] == [MAX_VERSION]
