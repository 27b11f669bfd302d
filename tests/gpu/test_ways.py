"""Every kind of model in every way to take a new version, with and without CUDA graphs: pushes equal cold starts, or
the daemon does not start and says why.

docs/gpu.md says which of them a GPU has run: a failure of another one may be the test's. Each test starts a
daemon, so all of them take an hour or two: `scripts/test tests/gpu -k "dense or experts"` is a beginning.
Daemons start cold, as CUDA does not begin in a process that was forked from one with torch."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.support import models
from tests.support.daemon_process import SMALL_ENGINE
from tests.support.matrix import MODES, WAYS, Kind, checkpoints_of, refused, served, two
from tests.support.subject import started

PINNED_BYTES = 256 << 20

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),
]


def needs(kind: Kind) -> None:
    """Skips on a GPU that vLLM has no kernels for."""
    present = torch.cuda.get_device_capability()
    if present < kind.capability:
        pytest.skip(f"{kind.name} needs compute capability {kind.capability}, and this GPU has {present}")


def least_kept_bytes(kind: Kind, way: str, checkpoint: Path) -> int:
    """What a GPU has to keep for pushes: vLLM's tensors are those of the checkpoint or larger, as it fuses some and
    pads others; quantising and repacking may halve them."""
    sizes = [tensor.nbytes for tensor in models.load_tensors(checkpoint).values()]
    kept = sum(sizes) + max(sizes) if way == "beside" else max(sizes)
    return kept // 2 if kind.refused else kept


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "way"), [pytest.param(*each, id=f"{each[0].name}-{each[1]}") for each in served()])
async def test_pushes_equal_cold_starts(kind: Kind, way: str, mode: str, tmp_path: Path) -> None:
    """Digests and greedy tokens of b, a, b, a; and memory that was kept and pinned as the daemon says."""
    needs(kind)
    flags, checkpoints = (*kind.flags, "--weight-update", way, *MODES[mode]), checkpoints_of(kind, tmp_path)
    async with started(checkpoints, tmp_path / "daemon", *flags, cold=True) as subject:
        info = await subject.client.server_info()
        assert (info.device, info.weight_update) == ("cuda", way)
        assert info.pinned_host_bytes == PINNED_BYTES
        assert info.reserved_device_bytes >= least_kept_bytes(kind, way, checkpoints["a"])
        await subject.oracle.holds((await subject.oracle.served_version(), "a"))


@pytest.mark.parametrize(("kind", "way"), [pytest.param(*each, id=f"{each[0].name}-{each[1]}") for each in refused()])
def test_what_cannot_be_exchanged_is_refused_at_the_start(kind: Kind, way: str, tmp_path: Path) -> None:
    """The last line says why: no push is needed to find out."""
    needs(kind)
    model = checkpoints_of(kind, tmp_path)["a"]
    flags = ["--model", str(model), *SMALL_ENGINE, *kind.flags, "--weight-update", way]
    command = [sys.executable, "-m", "genserve", "serve", "--port", "0", *flags]
    with (tmp_path / "stderr").open("w") as stderr:
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=stderr, timeout=600, check=False)
    said = (tmp_path / "stderr").read_text(errors="replace").strip()
    assert ended.returncode == 1, said[-3000:]
    assert kind.refused[way] in said.splitlines()[-1], said[-3000:]


@pytest.mark.parametrize("way", WAYS)
async def test_fifty_pushes_leave_the_devices_memory_as_it_was(way: str, tmp_path: Path) -> None:
    """What the first ones took is all that is ever taken."""
    async with started(two(tmp_path), tmp_path / "daemon", "--weight-update", way, cold=True) as subject:
        for name in ("b", "a"):  # kernels are loaded at their first use
            await subject.push(name)
        before, _ = torch.cuda.mem_get_info()
        reserved = (await subject.client.server_info()).reserved_device_bytes
        for name in ("b", "a") * 25:
            await subject.push(name)
        after, _ = torch.cuda.mem_get_info()
        assert before - after < 64 << 20
        assert (await subject.client.server_info()).reserved_device_bytes == reserved
        await subject.oracle.holds((await subject.oracle.served_version(), "a"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_a_rank_leaves_other_devices_alone(tmp_path: Path) -> None:
    """Each process of the engine has memory on one GPU, also after its background thread has prepared a version."""
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    flags = ("--tensor-parallel-size", "2")
    async with started(two(tmp_path), tmp_path / "daemon", *flags, cold=True) as subject:
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
