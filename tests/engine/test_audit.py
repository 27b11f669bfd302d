"""The audit of what vLLM builds: nothing of it is refused, and a daemon whose model hides a weight does not start."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genserve.client import AsyncClient
from genserve.errors import GenserveError
from tests.engine.audited_models import CONFIGS
from tests.engine.outputs import greedy_outputs, outputs_of
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.plain_vllm import Reference
from tests.support.warm import process

pytestmark = pytest.mark.long(
    "genserve/worker/update",
    "genserve/worker/model",
    "genserve/worker/versions.py",
    "genserve/worker/extension.py",
    "tests/support/kept_device.py",
    "tests/support/loader_calls.py",
    "tests/engine/audited_models.py",
    "tests/engine/hiding_worker.py",
    "tests/engine/caching_worker.py",
)


@pytest.fixture(scope="module")
def audits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an audit says of a model of each kind."""
    program = [sys.executable, "-m", "tests.engine.audited_models", str(tmp_path_factory.mktemp("audited")), *CONFIGS]
    done = process.run(program, timeout=280)
    lines = [line for line in done.stdout.splitlines() if line.startswith("AUDITS ")]
    assert lines, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("AUDITS "))
    return found


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_model_that_is_served_today_is_refused(audits: dict[str, Any], kind: str) -> None:
    """However its weights are taken; and nothing of it has to be called a constant."""
    says = {"BesideUpdate": "no tensor gave a value to ", "InPlaceUpdate": "no tensor gave a complete value to "}
    for way, lacks in says.items():
        assert audits[kind][f"{way} at the start"] == []
        assert audits[kind][f"{way} at a push"].startswith(lacks)


@pytest.mark.parametrize("kind", CONFIGS)
def test_both_ways_of_taking_a_version_leave_the_same_weights(audits: dict[str, Any], kind: str) -> None:
    """Everything of the other version is gone, also what post-processing makes on objects that it makes itself."""
    found = audits[kind]
    a, b, c = ([found[f"{way} {version}"] for way in ("BesideUpdate", "InPlaceUpdate")] for version in "abc")
    assert (a[0], b[0], c[0]) == (a[1], b[1], c[1])
    assert a[0].keys() == b[0].keys() == c[0].keys()
    assert a[0] != b[0] != c[0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_third_version_needs_no_loader_and_equals_what_it_would_load(audits: dict[str, Any], kind: str) -> None:
    """Every kind's loader is recorded at the first version, and the recording is proven at the second one."""
    found = audits[kind]
    assert found["loader calls a"] > 0
    assert found["loader calls b"] > 0
    assert found["loader calls c"] == 0
    assert found["BesideUpdate c"] == found["loaded c"]


def test_a_weight_that_a_layer_hides_is_refused_in_every_way(audits: dict[str, Any]) -> None:
    """By its path; also at a push, as steps may leave something on a layer after the start."""
    assert len(audits["hidden"]) == 4
    for answer in audits["hidden"].values():
        assert "leave model.layers.1.mlp.kernel['scale'] (1 in all)" in answer


def test_a_daemon_whose_model_hides_a_weight_does_not_start(checkpoints: dict[str, Path]) -> None:
    """Its last line names the tensor."""
    flags = ["--model", str(checkpoints["a"]), "--worker-extension-cls", "tests.engine.hiding_worker.HidingExtension"]
    command = [sys.executable, "-m", "genserve", "serve", "--port", "0", *SMALL_ENGINE, *flags]
    done = process.run(command, timeout=280)
    assert done.returncode == 1, done.stderr[-3000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("genserve: worker "), done.stderr[-3000:]
    assert "model.layers.1.mlp.precision_config.weight_scale" in last


@pytest.mark.parametrize("weight_update", ["beside", "inplace"])
async def test_weight_copy_made_by_a_step_is_never_served_with_another_version(
    checkpoints: dict[str, Path], reference: Callable[..., Reference], tmp_path: Path, weight_update: str
) -> None:
    """The push is refused, and the version that is served goes on."""
    extension = "tests.engine.caching_worker.CachingExtension"
    flags = ["--worker-extension-cls", extension, "--weight-update", weight_update]
    daemon = DaemonProcess(["--model", str(checkpoints["a"]), *SMALL_ENGINE, *flags], tmp_path / "stderr")
    try:
        async with AsyncClient(daemon.wait_serving().address) as client:
            assert await greedy_outputs(client) == outputs_of(reference("a"))
            with pytest.raises(GenserveError, match=r"model\.embed_tokens\.copied"):
                await client.push_weights(checkpoints["b"], version=1)
            assert await greedy_outputs(client) == outputs_of(reference("a"))
    finally:
        daemon.end()
