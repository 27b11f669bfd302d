"""Traps of vLLM's own layerwise reload, as they are in vLLM 0.32, and that genserve's pushes do not fall into them.

When a test of the first half fails, vLLM has been repaired: see what of genserve.worker can go.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from genserve.client import AsyncClient
from genserve.errors import PushRolledBackError
from tests.engine.outputs import greedy_outputs, next_version, outputs_of
from tests.engine.trap import run_steps
from tests.support import models
from tests.support.cpu_features import needs_avx512
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.faulty_worker import FAULTS_VARIABLE, FAULTY_EXTENSION, Fault, fired, order
from tests.support.plain_vllm import PROMPTS, Reference

V_PROJ = "model.layers.1.self_attn.v_proj.weight"
QKV = "model.layers.1.self_attn.qkv_proj.cpu_linear"
HEAD = "lm_head.cpu_linear"


@pytest.fixture(scope="module")
def answers(checkpoints: dict[str, Path]) -> dict[str, list[Any]]:
    """What one plain engine on checkpoint a answered, by what it was asked for."""
    a, b = str(checkpoints["a"]), str(checkpoints["b"])
    script: dict[str, list[list[Any]]] = {
        "cold": [["digests"]],
        "complete": [["reload", b, {}], ["digests"], ["generate", *PROMPTS[0]]],
        "back": [["reload", a, {}], ["digests"]],
        "lacking": [["reload", b, {"lacks": V_PROJ}], ["digests"]],
        "back again": [["reload", a, {}], ["digests"]],
        "failing": [["reload", b, {"before": V_PROJ}], ["digests"]],
        "complete after failing": [["reload", b, {}]],
        "once more": [["reload", a, {}], ["digests"]],
        "serving after failing": [["reload", b, {"before": V_PROJ}], ["generate", *PROMPTS[0]]],
    }
    given = iter(run_steps(checkpoints["a"], [step for steps in script.values() for step in steps]))
    return {name: [next(given) for _ in steps] for name, steps in script.items()}


def b_by_name(reference: Callable[..., Reference]) -> dict[str, str]:
    """Digests of a cold start on b, by name alone."""
    return {name.split(" ", 1)[1]: digest for name, digest in reference("b")["digests"].items()}


@needs_avx512
def test_vllm_keeps_the_packed_head_of_tied_weights(
    answers: dict[str, list[Any]], reference: Callable[..., Reference]
) -> None:
    """On the CPU a reload without any error answers with the old head: it has no parameter of its own to be loaded."""
    a, b = answers["cold"][0], b_by_name(reference)
    error, after, tokens = answers["complete"]
    assert error is None
    assert {name for name, digest in after.items() if digest != b[name]} == {HEAD}
    assert after[HEAD] == a[HEAD]
    assert tokens != outputs_of(reference("b"))[0]
    assert answers["back"] == [None, a]


def test_vllm_serves_uninitialised_memory_for_what_a_push_lacks(
    answers: dict[str, list[Any]], reference: Callable[..., Reference]
) -> None:
    """And does not say so."""
    a, b = answers["cold"][0], b_by_name(reference)
    error, after = answers["lacking"]
    assert error is None
    assert after[QKV] not in (a[QKV], b[QKV])
    assert answers["back again"] == [None, a]


@needs_avx512
def test_vllm_fails_the_complete_push_after_one_that_failed_in_a_layer(answers: dict[str, list[Any]]) -> None:
    """The layer's half-loaded parts are kept: the next push completes them with the wrong ones."""
    failed, unreadable = answers["failing"]
    assert f"ordered to fail before {V_PROJ}" in failed["error"]
    assert "Cannot copy out of meta tensor" in unreadable["error"], "the model is left without some of its weights"
    assert "'Parameter' object has no attribute 'weight_loader'" in answers["complete after failing"][0]["error"]
    assert answers["once more"] == [None, answers["cold"][0]], "the push after that one works"


def test_vllm_dies_of_generating_after_a_push_that_failed_in_a_layer(answers: dict[str, list[Any]]) -> None:
    """There is no version to go on with."""
    failed, generated = answers["serving after failing"]
    assert f"ordered to fail before {V_PROJ}" in failed["error"]
    assert "EngineCore encountered an issue" in generated["error"]


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the daemon's worker looks for orders to fail."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def faulty_daemon(
    checkpoints: dict[str, Path], faults: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    """A daemon on checkpoint a whose worker fails when it is ordered to."""
    flags = ["--model", str(checkpoints["a"]), *SMALL_ENGINE, "--worker-extension-cls", FAULTY_EXTENSION]
    log = tmp_path_factory.mktemp("faulty") / "stderr"
    process = DaemonProcess(flags, log, env={FAULTS_VARIABLE: str(faults)})
    try:
        yield process.wait_serving()
    finally:
        process.end()


@pytest.fixture(scope="module")
async def faulty(faulty_daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    """A client of that daemon."""
    async with AsyncClient(faulty_daemon.address) as connected:
        yield connected


async def test_genserve_is_unharmed_by_a_push_that_failed_in_a_layer(
    faulty: AsyncClient, faults: Path, checkpoints: dict[str, Path], reference: Callable[..., Reference]
) -> None:
    """The old version goes on, bit for bit, and the next complete push is exact to the head."""
    tensors = dict(sorted(models.load_tensors(checkpoints["b"]).items()))
    order(faults, Fault("load", after=list(tensors).index(V_PROJ)))
    with pytest.raises(PushRolledBackError, match="ordered to fail in load"):
        await faulty.push_weights(tensors, version=await next_version(faulty))
    assert fired(faults) == 1
    for name in ("a", "b"):
        if name == "b":
            await faulty.push_weights(tensors, version=await next_version(faulty))
        served = await faulty.get_weights(include_digests=True)
        digests = {f"{rank} {tensor}": value for (rank, tensor), value in served.digests.items()}
        assert digests == reference(name)["digests"]
        assert await greedy_outputs(faulty) == outputs_of(reference(name))
