"""Every way to take a new version, with and without CUDA graphs: pushes equal cold starts, and cost what is said.

No GPU has run this yet: a failure here may be the test's. docs/gpu.md says what should happen."""

from pathlib import Path

import psutil
import pytest
import torch

from tests import models
from tests.faults.subject import started

MODES = {"graphs": (), "eager": ("--enforce-eager",)}
SLEEPS = ("--enable-sleep-mode",)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),
]


def two(make: str, directory: Path, scale: float = 0.5) -> dict[str, Path]:
    """Two checkpoints of one architecture."""
    a = getattr(models, make)(directory / "a", seed=0)
    return {"a": a, "b": models.perturbed(a, directory / "b", seed=1, scale=scale)}


def sizes_of(checkpoint: Path) -> list[int]:
    """Of its tensors, in bytes; the model's are these or larger, as it fuses some and pads others."""
    return [int(tensor.nbytes) for tensor in models.load_tensors(checkpoint).values()]


@pytest.mark.parametrize("way", ["beside", "host", "inplace"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", ["tiny_qwen3", "tiny_qwen2", "tiny_qwen3_moe"])
async def test_pushes_equal_cold_starts(way: str, mode: str, model: str, tmp_path: Path) -> None:
    """Digests and greedy tokens of b, a, b, a; and memory that was kept and pinned as the daemon says."""
    checkpoints = two(model, tmp_path)
    async with started(checkpoints, tmp_path / "daemon", "--weight-update", way, *MODES[mode]) as subject:
        info = await subject.client.server_info()
        assert (info.device, info.weight_update) == ("cuda", way)
        assert info.pinned_host_bytes == 256 << 20
        sizes = sizes_of(checkpoints["a"])
        kept = {"beside": sum(sizes) + max(sizes), "host": max(sizes), "inplace": max(sizes)}
        assert info.reserved_device_bytes >= kept[way]
        await subject.oracle.holds((await subject.oracle.served_version(), "a"))


@pytest.mark.parametrize("way", ["beside", "inplace"])
async def test_weights_that_are_quantised_as_they_are_loaded(way: str, tmp_path: Path) -> None:
    """fp8, from a bf16 push: where it is served at all, it is served as a cold start serves it."""
    flags = ("--quantization", "fp8", "--weight-update", way)
    checkpoints = two("tiny_qwen3", tmp_path)
    async with started(checkpoints, tmp_path / "daemon", *flags) as subject:
        if way == "beside":  # a byte at least for each two of the checkpoint's; the structure alone has no storage yet
            reserved_bytes = (await subject.client.server_info()).reserved_device_bytes
            assert reserved_bytes >= sum(sizes_of(checkpoints["a"])) // 2
        await subject.oracle.holds((await subject.oracle.served_version(), "a"))


@pytest.mark.parametrize("way", ["beside", "host", "inplace"])
async def test_fifty_pushes_leave_the_devices_memory_as_it_was(way: str, tmp_path: Path) -> None:
    """What the first ones took is all that is ever taken."""
    async with started(two("tiny_qwen3", tmp_path), tmp_path / "daemon", "--weight-update", way) as subject:
        for name in ("b", "a"):  # kernels are loaded at their first use
            await subject.push(name)
        before, _ = torch.cuda.mem_get_info()
        for name in ("b", "a") * 25:
            await subject.push(name)
        after, _ = torch.cuda.mem_get_info()
        assert before - after < 64 << 20
        await subject.oracle.holds((await subject.oracle.served_version(), "a"))


@pytest.mark.parametrize("mode", MODES)
async def test_pushes_follow_a_sleep(mode: str, tmp_path: Path) -> None:
    """The memory that sleep gives back and takes again holds the weights still."""
    flags = (*SLEEPS, *MODES[mode])
    async with started(two("tiny_qwen3", tmp_path), tmp_path / "daemon", *flags) as subject:
        for _ in range(2):
            await subject.client.sleep()
            await subject.client.wake_up()
            await subject.push("b")
            await subject.push("a")
        await subject.oracle.holds((await subject.oracle.served_version(), "a"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_a_rank_leaves_other_devices_alone(tmp_path: Path) -> None:
    """Each process of the engine has memory on one GPU, also after its background thread has prepared a version."""
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    flags = ("--tensor-parallel-size", "2")
    async with started(two("tiny_qwen3", tmp_path), tmp_path / "daemon", *flags) as subject:
        await subject.push("b")
        await subject.push("a")
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2)]
        by_device = [{each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)} for handle in handles]
        assert by_device[0], "the driver names no processes here: nothing is proven"
        family = psutil.Process(subject.process.process.pid).children(recursive=True)
        workers = [each.pid for each in family if "Worker" in "".join(each.cmdline())]
        assert len(workers) >= 2
        assert [sum(pid in device for device in by_device) for pid in workers] == [1] * len(workers)
        await subject.oracle.holds((await subject.oracle.served_version(), "a"))
