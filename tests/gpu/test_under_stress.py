"""Pushes on a GPU beside what else it does: work that is queued, memory that is gone, sleep, and adapters.

docs/gpu.md says which of them a GPU has run: a failure of another one may be the test's."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from genserve.client import AsyncClient
from genserve.errors import PushRolledBackError
from tests.support.adapters import CONFIG, VOCABULARY, adapter, merged, scores
from tests.support.faulty_worker import Fault
from tests.support.matrix import MODES, WAYS, checkpoints_of, kind_named, two
from tests.support.subject import started

SLEEPS = ("--enable-sleep-mode",)
_LEFT_BYTES = 32 << 20

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("way", ["beside", "host"])
async def test_a_push_under_a_lease_waits_for_what_it_has_queued(way: str, tmp_path: Path) -> None:
    """A pause that is held does not wait for the device again. The stream of the background thread has two seconds of
    work queued between the weights that were loaded and their post-processing: the commit comes after both."""
    async with started(two(tmp_path), tmp_path / "daemon", "--weight-update", way, cold=True) as subject:
        version = await subject.oracle.served_version()
        async with subject.client.paused() as lease:
            subject.order(Fault("load", "queue", after=-1, seconds=2.0))
            await subject.push("b", pause_lease_id=lease.lease_id)
            subject.release()
        await subject.oracle.holds((version + 1, "b"))


@pytest.mark.parametrize("way", WAYS)
async def test_pushes_need_no_memory_that_is_not_theirs(way: str, tmp_path: Path) -> None:
    """Another process takes all that is free on the GPU: what pushes need was taken at the start."""
    async with started(two(tmp_path), tmp_path / "daemon", "--weight-update", way, cold=True) as subject:
        taken = _everything_but(_LEFT_BYTES)
        await subject.oracle.holds((await subject.oracle.served_version(), "a"))
        assert torch.cuda.mem_get_info()[0] < 2 * _LEFT_BYTES, "memory was free: nothing is proven"
        del taken


def _everything_but(left_bytes: int) -> list[torch.Tensor]:
    """All memory of the GPU that is free, but for so many bytes."""
    taken: list[torch.Tensor] = []
    size = torch.cuda.mem_get_info()[0]
    while size >= 1 << 20:
        free = torch.cuda.mem_get_info()[0] - left_bytes
        with suppress(torch.OutOfMemoryError):  # fragments are taken piece by piece
            taken.append(torch.empty(max(1, min(size, free)), dtype=torch.uint8, device="cuda"))
        size //= 2
    return taken


@pytest.mark.parametrize("step", [("load", 3), ("load", -1), ("commit", 5)])
@pytest.mark.parametrize("way", ["beside", "host"])
async def test_memory_that_runs_out_leaves_the_old_version_live(
    way: str, step: tuple[str, int], tmp_path: Path
) -> None:
    """While a version is built, or in the middle of its exchange; and the next push works."""
    name, after = step
    async with started(two(tmp_path), tmp_path / "daemon", "--weight-update", way, cold=True) as subject:
        version = await subject.oracle.served_version()
        error = await subject.fails(PushRolledBackError, Fault(name, "oom", after=after))
        assert "OutOfMemoryError" in error.message
        await subject.oracle.holds((version, "a"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", ["dense", "awq", "drafts"])
async def test_pushes_follow_a_sleep(name: str, level: int, mode: str, tmp_path: Path) -> None:
    """The memory that sleep gives back and takes again holds the weights still; asleep, the GPU has that memory."""
    kind = kind_named(name)
    flags = (*SLEEPS, *kind.flags, *MODES[mode])
    async with started(checkpoints_of(kind, tmp_path), tmp_path / "daemon", *flags, cold=True) as subject:
        for _ in range(2):
            awake, _ = torch.cuda.mem_get_info()
            await subject.client.sleep(level=level)
            asleep, _ = torch.cuda.mem_get_info()
            assert asleep > awake
            await subject.client.wake_up()
            await subject.push("b")
            await subject.push("a")
        await subject.oracle.holds((await subject.oracle.served_version(), "a"))


@pytest.mark.parametrize("way", WAYS)
async def test_adapters_outlive_pushes(way: str, tmp_path: Path) -> None:
    """One says on the weights that are pushed beneath it what merged weights say, and the same again on the first."""
    checkpoints = two(tmp_path)
    flags = ("--enable-lora", "--max-lora-rank", "8", "--max-logprobs", str(VOCABULARY), "--weight-update", way)
    async with started(checkpoints, tmp_path / "daemon", *flags, cold=True) as subject:
        client, one = subject.client, adapter(checkpoints["a"], seed=1)
        await client.push_lora("one", one, CONFIG)
        said: dict[str, Any] = {}
        for name in ("a", "b", "a"):
            await subject.push(name)
            found = await scores(client, "one")
            assert said.setdefault(name, found) == found
            assert _distance(found, await scores(client)) > 0.5
            await _push_tensors(client, merged(checkpoints[name], one))
            assert _distance(found, await scores(client)) < 0.3  # in bfloat16
        assert said["a"] != said["b"]
        await client.unload_lora("one")
        await subject.push("a")


def _distance(one: list[float], other: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(one, other, strict=True))


async def _push_tensors(client: AsyncClient, tensors: dict[str, torch.Tensor]) -> None:
    version = (await client.get_weights()).weight_version + 1
    await client.push_weights({name: each.to(torch.bfloat16) for name, each in tensors.items()}, version=version)
