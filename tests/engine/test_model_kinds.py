"""Pushes into models whose weights vLLM packs in other ways than those of a dense one: each equals a cold start."""

from collections.abc import Callable
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from tests.engine.outputs import next_version, outputs_of, state_of
from tests.support import models
from tests.support.cpu_features import needs_avx512
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.plain_vllm import Reference, plain_vllm

pytestmark = pytest.mark.long(
    "genserve/worker",
    "genserve/weights/checkpoint",
    "genserve/tensors",
    "tests/support/models.py",
    "tests/support/quantised.py",
)


def experts(directory: Path) -> tuple[Path, Path]:
    """A mixture of experts with a head of its own, and another one that is stored in wider types."""
    a = models.tiny_qwen3_moe(directory / "a", tie=False)
    b = models.perturbed(a, directory / "perturbed", seed=1, scale=0.5)
    return a, models.in_types(b, directory / "b", ["float32", "float16", "bfloat16"])


def quantised(directory: Path) -> tuple[Path, Path]:
    """Checkpoints in int8, int4 and FP8."""
    a = models.tiny_qwen3(directory / "a_full")
    b = models.perturbed(a, directory / "b_full", seed=1, scale=0.5)
    return models.quantised(a, directory / "a", 0.02), models.quantised(b, directory / "b", 0.005)


@pytest.mark.parametrize("kind", [experts, pytest.param(quantised, marks=needs_avx512)])
async def test_a_push_equals_a_cold_start(kind: Callable[[Path], tuple[Path, Path]], tmp_path: Path) -> None:
    """There, back and there again: nothing of one push is left over in the next, and each version is exact."""
    a, b = kind(tmp_path)
    process = DaemonProcess(["--model", str(a), *SMALL_ENGINE], tmp_path / "stderr")
    try:
        cold = plain_vllm(b)  # while the daemon starts
        process.wait_serving()
        async with AsyncClient(process.address) as client:
            first = await state_of(client)
            assert first[0] != outputs_of(cold)
            assert first[1] != cold["digests"]
            assert first[1].keys() == cold["digests"].keys()
            for checkpoint, expected in ((b, (outputs_of(cold), cold["digests"])), (a, first), (b, None)):
                await client.push_weights(checkpoint, version=await next_version(client))
                assert await state_of(client) == (expected or (outputs_of(cold), cold["digests"]))
    finally:
        process.end()


async def test_a_tied_head_may_be_pushed_too(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path], reference: Callable[..., Reference]
) -> None:
    """A state dict has it, the checkpoint leaves it out."""
    tensors = models.load_tensors(checkpoints["b"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    await client.push_weights(tensors, version=await next_version(client))
    b = reference("b")
    assert await state_of(client) == (outputs_of(b), b["digests"])
