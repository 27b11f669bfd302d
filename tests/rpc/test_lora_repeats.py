"""A push of an adapter that is repeated late: what has replaced the adapter meanwhile stays unless `force` is given."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from genserve.client import AsyncClient
from genserve.errors import PushConflictError, VersionNotNewerError, WeightVersionMismatchError
from tests.support.scripted_adapter import CONFIG, TENSORS
from tests.support.scripted_daemon import Daemon

OTHER = {name: 2 * tensor for name, tensor in TENSORS.items()}


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[AsyncClient]:
    """One of a daemon that takes adapters. None is left afterwards."""
    daemon.engine.max_loras = 4
    async with AsyncClient(daemon.address) as connected:
        yield connected
        for lora in await connected.list_loras():
            await connected.unload_lora(lora.name)


async def served(client: AsyncClient) -> tuple[str, int]:
    """Which push brought the adapter, and its version."""
    (lora,) = await client.list_loras()
    return lora.source, lora.version


async def test_a_repeat_does_not_undo_a_rollback_to_its_version(client: AsyncClient) -> None:
    """The adapter that is loaded has its version, and is another one."""
    await client.push_lora("x", TENSORS, CONFIG, version=1, expected_version=0, push_id="first")
    await client.push_lora("x", OTHER, CONFIG, version=2, push_id="second")
    await client.push_lora("x", OTHER, CONFIG, version=1, force=True, push_id="back")
    with pytest.raises((VersionNotNewerError, WeightVersionMismatchError)):
        await client.push_lora("x", TENSORS, CONFIG, version=1, expected_version=0, push_id="first")
    assert await served(client) == ("push back", 1)


async def test_a_repeat_does_not_replace_what_was_loaded_after_an_unload(client: AsyncClient) -> None:
    """Numbers begin anew then, so the version is the same."""
    await client.push_lora("x", TENSORS, CONFIG, version=1, push_id="first")
    await client.unload_lora("x")
    await client.push_lora("x", OTHER, CONFIG, version=1, push_id="second")
    with pytest.raises(VersionNotNewerError):
        await client.push_lora("x", TENSORS, CONFIG, version=1, push_id="first")
    assert await served(client) == ("push second", 1)


async def test_a_repeat_without_a_version_does_not_replace_a_later_adapter(client: AsyncClient) -> None:
    """It would serve the old tensors under the newest number."""
    await client.push_lora("x", TENSORS, CONFIG, push_id="first")
    await client.push_lora("x", OTHER, CONFIG, push_id="second")
    with pytest.raises(VersionNotNewerError):
        await client.push_lora("x", TENSORS, CONFIG, push_id="first")
    assert await served(client) == ("push second", 2)


async def test_a_repeat_without_a_version_keeps_the_version(client: AsyncClient) -> None:
    """The same adapter is no new one: whoever counts pushes would count it twice."""
    await client.push_lora("x", TENSORS, CONFIG, push_id="first")
    result = await client.push_lora("x", TENSORS, CONFIG, push_id="first")
    assert (result.push.weight_version, await served(client)) == (1, ("push first", 1))


async def test_other_tensors_under_the_id_of_a_push_are_no_repeat(daemon: Daemon, client: AsyncClient) -> None:
    """Two adapters would have one version, and no span could tell them apart."""
    await client.push_lora("x", TENSORS, CONFIG, push_id="first")
    with pytest.raises(PushConflictError):
        await client.push_lora("x", OTHER, CONFIG, push_id="first")
    assert await served(client) == ("push first", 1)
    loaded = load_file(Path(daemon.engine.loras.files["x"].directory) / "adapter_model.safetensors")
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)


@pytest.mark.slow
async def test_a_repeat_is_one_however_many_other_adapters_came_since(client: AsyncClient) -> None:
    """What is known of an adapter's push is known as long as the adapter is loaded."""
    await client.push_lora("x", TENSORS, CONFIG, push_id="first")
    for _ in range(70):
        await client.push_lora("other", TENSORS, CONFIG)
    result = await client.push_lora("x", TENSORS, CONFIG, push_id="first", expected_version=0)
    assert result.push.weight_version == 1


async def test_a_repeat_that_names_a_version_brings_that_one(client: AsyncClient) -> None:
    """Or is refused as any push of it: the first time it was the next one, as another daemon may count it."""
    await client.push_lora("x", TENSORS, CONFIG, push_id="first")
    result = await client.push_lora("x", TENSORS, CONFIG, push_id="first", version=7)
    assert (result.push.weight_version, await served(client)) == (7, ("push first", 7))
    with pytest.raises(PushConflictError):
        await client.push_lora("x", TENSORS, CONFIG, push_id="first", version=6)
    assert await served(client) == ("push first", 7)


async def test_a_repeat_that_names_an_older_version_does_not_go_back(client: AsyncClient) -> None:
    """Unless it says so."""
    await client.push_lora("x", OTHER, CONFIG, version=4)
    await client.push_lora("x", TENSORS, CONFIG, push_id="first")
    with pytest.raises(VersionNotNewerError):
        await client.push_lora("x", TENSORS, CONFIG, push_id="first", version=3)
    assert await served(client) == ("push first", 5)
    await client.push_lora("x", TENSORS, CONFIG, push_id="first", version=3, force=True)
    assert await served(client) == ("push first", 3)
