"""Every kind of model in every way, in vLLM's worker without an engine: what a push leaves equals a cold start.

What kernels write keeps the contents that fresh memory has here, the same live and pushed. So for kinds that kernels
pack or quantise this says that a push writes the tensors that a cold start writes, and nothing about their contents.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.fake_cuda.workers import Loaded
from tests.support.matrix import KINDS, WAYS, Kind

pytestmark = pytest.mark.usefixtures("engine")

LONG = pytest.mark.long("genserve/worker", "genserve/engine", "tests/support/fake_cuda")

CONTENTS_OF_KERNELS = frozenset({"fp8-blocks"})
"""Kinds that a compiled graph post-processes. Its kernels do nothing, and nothing fills the memory that they were to
write, so the contents are chance. What is left: a push raises nothing, and its pause allocates nothing."""


LONG_WAYS = {
    "dense-with-biases": WAYS,
    "latent-attention": ("host", "inplace"),
    "linear-attention": ("host", "inplace"),
    "images": ("host", "inplace"),
    "fp8-static": ("inplace",),
    "fp8-blocks": WAYS,
    "awq": WAYS,
}
"""Half of the time: here our code does what it does for other kinds that are always tested in these ways."""


def _in_ways() -> Iterator[Any]:
    """Kinds and ways, a kind after the other."""
    for kind in KINDS:
        for way in WAYS:
            is_long = way in LONG_WAYS.get(kind.name, ())
            yield pytest.param(kind, way, id=f"{kind.name}-{way}", marks=[LONG] if is_long else [])


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Each kind once: its tests follow one another."""
    kind: Kind = request.param
    os.environ["FAKE_CUDA_POISON"] = "251"
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory
    yield Loaded.of(kind, tmp_path_factory.mktemp(kind.name))
    torch.use_deterministic_algorithms(False)
    del os.environ["FAKE_CUDA_POISON"]


@pytest.mark.parametrize(("loaded", "way"), list(_in_ways()), indirect=["loaded"], scope="module")
def test_pushes_equal_cold_starts(loaded: Loaded, way: str) -> None:
    """b, a, b, a, with the planned loads that begin with the third; and after the memory was given back. No pause
    allocates. A kind that cannot be pushed in this way is refused."""
    if way in loaded.kind.refused:
        with pytest.raises(ValueError, match=loaded.kind.refused[way]):
            loaded.update(way)
        return
    assert loaded.cold["a"] != loaded.cold["b"]
    updated = loaded.update(way)
    for name in "baba":
        assert (differing := updated.push(name)) == [] or loaded.kind.name in CONTENTS_OF_KERNELS, differing
    updated.update.release_memory()
    updated.update.reserve_memory()
    for name in "ba":
        assert (differing := updated.push(name)) == [] or loaded.kind.name in CONTENTS_OF_KERNELS, differing
