"""Version 0 is what the engine has loaded, whatever becomes of the checkpoint's files afterwards."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from genserve.client import AsyncClient
from genserve.errors import NotResidentError
from tests.support import models, patience
from tests.support.daemon_process import DaemonProcess
from tests.support.subject import daemon_process

FILE = "model.safetensors"


@pytest.fixture
def served(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of checkpoint a, to be written to."""
    return Path(shutil.copytree(checkpoints["a"], tmp_path / "a"))


@asynccontextmanager
async def serving(process: DaemonProcess) -> AsyncIterator[AsyncClient]:
    """A client of a daemon that has just been started."""
    try:
        await asyncio.to_thread(process.wait_serving)
        async with AsyncClient(process.address) as client:
            yield client
    finally:
        await asyncio.to_thread(process.stop)


def content(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of every tensor."""
    tensors = models.load_tensors(checkpoint)
    return {name: each.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, each in tensors.items()}


async def pulled(client: AsyncClient) -> dict[str, bytes]:
    """The bytes of every tensor, as the daemon sends them."""
    return {name: bytes(each.data) for name, each in (await client.pull_weights()).tensors.items()}


async def test_what_is_saved_over_the_checkpoint_is_never_taken_for_version_0(
    served: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """By renaming, which leaves the file that the engine has loaded as it was; in place; and cut off."""
    a, b = content(served), content(checkpoints["b"])
    first = sorted(a)[0]
    one = {first: models.load_tensors(checkpoints["b"])[first]}
    kept = served / "kept"
    os.link(served / FILE, kept)  # the file that the engine has loaded
    async with serving(daemon_process(served, tmp_path / "daemon")) as client:
        loaded = await client.get_weights(include_digests=True)
        assert loaded.resident
        shutil.copy(checkpoints["b"] / FILE, served / "new")
        os.rename(served / "new", served / FILE)
        assert await pulled(client) == a != b

        shutil.copyfile(checkpoints["b"] / FILE, kept)
        for _ in range(2):
            with pytest.raises(NotResidentError, match="files have changed"):
                await client.pull_weights()
            with pytest.raises(NotResidentError, match="files have changed"):
                await client.push_weights(one, version=1, partial=True)
            os.truncate(kept, 100)
        now = await client.get_weights(include_digests=True)
        assert (now.resident, now.weight_version, now.digests) == (False, 0, loaded.digests)

        await client.push_weights(checkpoints["b"], version=1)
        await client.push_weights(one, version=2, partial=True)
        assert await pulled(client) == b


async def test_what_is_saved_while_the_engine_starts_is_noticed(served: Path, tmp_path: Path) -> None:
    """Nobody knows then which bytes it has loaded."""
    process = daemon_process(served, tmp_path / "daemon")
    await patience.until(lambda: "starting the engine" in process.stderr)
    shutil.copyfile(served / FILE, served / "new")
    os.rename(served / "new", served / FILE)
    async with serving(process) as client:
        assert not (await client.get_weights()).resident
        with pytest.raises(NotResidentError, match="changed while the daemon started"):
            await client.pull_weights()
        await client.push_weights(served, version=1)
        assert (await client.get_weights()).resident
    assert "version 0 is not resident" in process.stderr


async def test_an_engine_that_loads_no_file_has_no_bytes_of_version_0(served: Path, tmp_path: Path) -> None:
    """Trainers that push at once start it on random weights."""
    first = sorted(content(served))[0]
    one = {first: models.load_tensors(served)[first]}
    async with serving(daemon_process(served, tmp_path / "daemon", "--load-format", "dummy")) as client:
        assert not (await client.get_weights()).resident
        with pytest.raises(NotResidentError, match="load-format dummy"):
            await client.push_weights(one, version=1, partial=True)
        await client.push_weights(served, version=1)
        assert (await client.get_weights()).resident
        assert await pulled(client) == content(served)
