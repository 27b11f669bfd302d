"""The matrix of tests/gpu, held against vLLM without a GPU: pushes of each kind of model equal cold starts."""

import json
import sys
from collections.abc import Callable
from functools import cache

import pytest

from tests.support.cpu_features import HAS_AMX
from tests.support.matrix import Kind
from tests.support.on_cpu import CHECKED
from tests.support.warm import process

_EVERY_DAY = ("latent-attention",)
"""Its layers compute more tensors from what is loaded, which no other test of the CPU pushes. Experts, drafts and
quantised layers are in test_model_kinds.py and test_drafts.py, and all kinds in tests/fake_cuda."""
LONG = pytest.mark.long(
    *("genserve/worker/update", "genserve/worker/model", "genserve/installed_engine.py"),
    *(f"tests/support/{name}.py" for name in ("on_cpu", "matrix", "kinds", "models", "quantised", "vision")),
)


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """What is wrong with a kind, and with those that are looked at in the same process."""

    @cache
    def of(*names: str) -> dict[str, str]:
        program = [sys.executable, "-m", "tests.support.on_cpu", str(tmp_path_factory.mktemp("kinds")), *names]
        done = process.run(program, timeout=280)
        lines = [line for line in done.stdout.splitlines() if line.startswith("KINDS ")]
        assert lines, done.stderr[-4000:]
        found: dict[str, str] = json.loads(lines[0].removeprefix("KINDS "))
        return found

    others = [kind.name for kind in CHECKED if kind.name not in _EVERY_DAY]
    return lambda name: of(*(_EVERY_DAY if name in _EVERY_DAY else others))


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=kind.name, marks=() if kind.name in _EVERY_DAY else LONG) for kind in CHECKED],
)
def test_vllm_takes_the_checkpoints_and_pushes_of_them_equal_cold_starts(
    kind: Kind, findings: Callable[[str], dict[str, str]]
) -> None:
    """A kind that the CPU backend cannot load is held against the names and shapes of vLLM's class."""
    if kind.needs_amx and not HAS_AMX:
        pytest.skip("vLLM's CPU backend has a kernel for it with AMX only")
    assert findings(kind.name)[kind.name] == ""
