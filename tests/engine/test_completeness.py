"""A push is complete when it brings what the engine loads: the checkpoint's file may have more. Where these layers
draft, a push without them is refused (test_drafts)."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from genserve.client import AsyncClient
from genserve.errors import ManifestMismatchError
from tests.engine.outputs import next_version, state_of
from tests.support import kinds, models
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.refusals import refuses

INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"


def made(directory: Path, seed: int) -> Path:
    """A checkpoint with a layer that drafts, and a buffer that old trainers have saved."""
    kinds.tiny_mtp(directory, seed=seed)
    tensors = {**models.load_tensors(directory), INV_FREQ: torch.ones(16)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two of the same kind."""
    directory = tmp_path_factory.mktemp("completeness")
    return made(directory / "a", 1), made(directory / "b", 2)


@pytest.fixture(scope="module", params=["beside", "inplace"])
def daemon(
    request: pytest.FixtureRequest, checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    """One that serves the first of them, and drafts nothing."""
    flags = ["--model", str(checkpoints[0]), *SMALL_ENGINE, "--weight-update", request.param]
    process = DaemonProcess(flags, tmp_path_factory.mktemp("daemon") / "stderr")
    try:
        yield process.wait_serving()
    finally:
        process.end()


@pytest.fixture
async def client(daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.address) as connected:
        yield connected


async def test_tensors_that_the_engine_does_not_load_may_be_left_out(
    client: AsyncClient, checkpoints: tuple[Path, Path]
) -> None:
    """The version is the same as with them, to the bit; and the next push may complete itself from it."""
    whole = models.load_tensors(checkpoints[1])
    trained = {name: tensor for name, tensor in whole.items() if "mtp_layers" not in name and name != INV_FREQ}
    assert len(trained) < len(whole) - 5
    states = []
    for tensors in (whole, models.load_tensors(checkpoints[0]), trained, trained):
        await client.push_weights(tensors, version=await next_version(client))
        states.append(await state_of(client))
    assert states[0] == states[2] == states[3] != states[1]
    norm = {"model.norm.weight": trained["model.norm.weight"]}
    await client.push_weights(norm, version=await next_version(client), partial=True)
    assert await state_of(client) == states[0]


async def test_what_the_engine_loads_may_not_be(client: AsyncClient, checkpoints: tuple[Path, Path]) -> None:
    """Each is named, also a part of what vLLM fuses. What is left out has to fit where it is brought."""
    whole = models.load_tensors(checkpoints[1])
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        lacking = {each: tensor for each, tensor in whole.items() if each != name}
        with refuses(ManifestMismatchError, field=f'header.manifest.tensors["{name}"]', says="is missing"):
            await client.push_weights(lacking, version=await next_version(client))
    with refuses(ManifestMismatchError, says=INV_FREQ):
        await client.push_weights(whole | {INV_FREQ: torch.ones(3)}, version=await next_version(client))
