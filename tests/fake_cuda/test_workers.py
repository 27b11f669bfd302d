"""Every kind of model in every way, in vLLM's worker without an engine: what a push leaves equals a cold start.

What kernels write keeps the contents that fresh memory has here, the same live and pushed. So for kinds that kernels
pack or quantise this says that a push writes the tensors that a cold start writes, and nothing about their contents.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.fake_cuda.workers import Loaded
from tests.support.matrix import KINDS, WAYS, Kind

pytestmark = pytest.mark.usefixtures("engine")

CONTENTS_OF_KERNELS = frozenset({"fp8-blocks"})
"""Kinds that a compiled graph post-processes. Its kernels do nothing, and nothing fills the memory that they were to
write, so the contents are chance. What is left: a push raises nothing, and its pause allocates nothing."""


@pytest.fixture(scope="module", params=[pytest.param(kind, id=kind.name) for kind in KINDS])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """Each kind once."""
    kind: Kind = request.param
    os.environ["FAKE_CUDA_POISON"] = "251"
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory
    yield Loaded.of(kind, tmp_path_factory.mktemp(kind.name))
    torch.use_deterministic_algorithms(False)
    del os.environ["FAKE_CUDA_POISON"]


@pytest.mark.parametrize("way", WAYS)
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
