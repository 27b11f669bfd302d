"""A daemon, as a user starts it, on the fake runtime. Its steps do not compute, so tokens prove nothing: weights do."""

import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from tests.support.adapters import CONFIG, adapter
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.matrix import checkpoints_of, kind_named, two

pytestmark = pytest.mark.timeout(900)

_START_TIMEOUT_S = 600.0
LONG = pytest.mark.long("genserve/worker", "genserve/engine", "tests/support/fake_cuda")
EAGER = "--enforce-eager"
"""Nothing is compiled, which takes most of a start."""


@asynccontextmanager
async def serving(
    model: Path, log: Path, *flags: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[AsyncClient, str]]:
    """A daemon on this checkpoint: a client of it, and its address."""
    process = DaemonProcess(["--model", str(model), *SMALL_ENGINE, *flags], log, env=dict(env or {}), cold=True)
    try:
        process.wait_serving(_START_TIMEOUT_S)
        async with AsyncClient(process.address) as client:
            yield client, process.address
    finally:
        process.stop()
    assert "fake CUDA:" not in process.stderr


async def digests(client: AsyncClient) -> Mapping[tuple[str, str], str]:
    """Of all live weights."""
    return (await client.get_weights(include_digests=True)).digests


async def push(client: AsyncClient, checkpoint: Path) -> None:
    """The next version."""
    version = (await client.get_weights()).weight_version + 1
    await client.push_weights(checkpoint, version=version, timeout_s=120.0)


async def test_a_push_at_default_flags_equals_a_cold_start(tmp_path: Path) -> None:
    """`genserve serve` and `genserve push`, with graphs. The witness is a daemon that starts on what was pushed; it
    captures no graphs, which have no part in what weights it has."""
    checkpoints = two(tmp_path)
    async with serving(checkpoints["b"], tmp_path / "b.log", EAGER) as (client, _):
        cold_b = await digests(client)
    async with serving(checkpoints["a"], tmp_path / "a.log") as (client, address):
        info = await client.server_info()
        assert (info.device, info.weight_update) == ("cuda", "beside")
        cold_a = await digests(client)
        assert cold_a != cold_b
        command = [sys.executable, "-m", "genserve", "push", "--target", address, str(checkpoints["b"])]
        subprocess.run(command, check=True, timeout=120)
        assert await digests(client) == cold_b
        await push(client, checkpoints["a"])
        assert await digests(client) == cold_a


@LONG
async def test_pushes_follow_a_sleep_of_either_level(tmp_path: Path) -> None:
    """With layers that draft."""
    kind = kind_named("drafts")
    checkpoints = checkpoints_of(kind, tmp_path)
    flags, env = (*kind.flags, "--enable-sleep-mode", EAGER), {"GENSERVE_FAKE_CUDA_DRAFTS": "1"}
    async with serving(checkpoints["a"], tmp_path / "log", *flags, env=env) as (client, _):
        cold = await digests(client)
        for level in (1, 2):
            await push(client, checkpoints["b"])
            pushed = await digests(client)
            assert pushed != cold
            await client.sleep(level=level)
            await client.wake_up()
            assert await digests(client) == pushed
            await push(client, checkpoints["a"])
            assert await digests(client) == cold


@pytest.mark.parametrize("way", ["beside", *(pytest.param(way, marks=LONG) for way in ("host", "inplace"))])
async def test_segments_that_grow_do_not_disturb_pushes(way: str, tmp_path: Path) -> None:
    """Trainers set this for all processes."""
    checkpoints = two(tmp_path)
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    async with serving(checkpoints["a"], tmp_path / "log", "--weight-update", way, EAGER, env=env) as (client, _):
        cold = await digests(client)
        await push(client, checkpoints["b"])
        assert await digests(client) != cold
        await push(client, checkpoints["a"])
        assert await digests(client) == cold


@LONG
async def test_pushes_go_on_beneath_adapters(tmp_path: Path) -> None:
    """What an adapter adds is computed by kernels: it is only loaded here."""
    checkpoints = two(tmp_path)
    flags = ("--enable-lora", "--max-lora-rank", "8", EAGER)
    async with serving(checkpoints["a"], tmp_path / "log", *flags) as (client, _):
        cold = await digests(client)
        await client.push_lora("one", adapter(checkpoints["a"], seed=1), CONFIG)
        await push(client, checkpoints["b"])
        assert await digests(client) != cold
        await client.unload_lora("one")
        await push(client, checkpoints["a"])
        assert await digests(client) == cold
