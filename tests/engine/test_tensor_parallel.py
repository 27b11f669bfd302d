"""A push into two tensor-parallel ranks, whose layers can have LoRA adapters."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from genserve.errors import PushRolledBackError
from tests.engine.outputs import greedy_outputs, outputs_of
from tests.support.adapters import CONFIG, PROMPT, adapter, merged
from tests.support.daemon_process import BOTH_CORES, SMALL_ENGINE, DaemonProcess
from tests.support.forgetful_worker import FORGETFUL_EXTENSION, SLEEPS_VARIABLE
from tests.support.plain_vllm import Reference


@pytest.fixture(scope="module")
async def sharded(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    """A client of a daemon on checkpoint a with two ranks, which take adapters."""
    log = tmp_path_factory.mktemp("sharded") / "stderr"
    flags = ["--model", str(checkpoints["a"]), "--tensor-parallel-size", "2", "--enable-lora", *SMALL_ENGINE]
    flags += ["--worker-extension-cls", FORGETFUL_EXTENSION]  # its ranks forget at a sleep what GPUs do
    process = DaemonProcess(flags, log, env={**BOTH_CORES, SLEEPS_VARIABLE: str(log.with_name("sleeps"))})
    try:
        process.wait_serving()
        async with AsyncClient(process.address) as client:
            yield client
    finally:
        process.end()


async def test_a_pushed_checkpoint_equals_a_cold_start_on_two_ranks(
    sharded: AsyncClient,
    checkpoints: dict[str, Path],
    reference: Callable[..., Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank takes its shard of every tensor: outputs and digests of both are those of a cold start."""
    for name, value in BOTH_CORES.items():
        monkeypatch.setenv(name, value)
    b = reference("b", 2)
    assert await greedy_outputs(sharded) != outputs_of(b)
    await sharded.push_weights(checkpoints["b"], version=1)
    assert await greedy_outputs(sharded) == outputs_of(b)
    served = await sharded.get_weights(include_digests=True)
    assert {f"{rank} {name}": value for (rank, name), value in served.digests.items()} == b["digests"]
    assert len({rank for rank, _ in served.digests}) == 2


async def test_an_adapter_is_loaded_on_both_ranks(sharded: AsyncClient, checkpoints: dict[str, Path]) -> None:
    """It says what weights say that it is merged into, but for bfloat16's rounding; one that fails is on neither."""

    async def likely(lora_name: str | None = None) -> dict[int, float]:
        generation = await sharded.generate(PROMPT, max_tokens=1, temperature=0.0, logprobs=20, lora_name=lora_name)
        logprobs = generation.sequences[0].logprobs
        assert logprobs is not None
        return dict(logprobs.alternatives(0))

    def distance(one: dict[int, float], other: dict[int, float]) -> float:
        common = one.keys() & other.keys()
        return sum(abs(one[i] - other[i]) for i in common) / len(common) if common else float("inf")

    version = (await sharded.get_weights()).weight_version + 1
    await sharded.push_weights(checkpoints["a"], version=version)
    tensors = adapter(checkpoints["a"], seed=1)
    base = await likely()
    await sharded.push_lora("policy", tensors, CONFIG)
    found = await likely("policy")
    with pytest.raises(PushRolledBackError, match=r"tp0.*PiSSA.*tp1.*PiSSA"):
        await sharded.push_lora("policy", tensors, CONFIG | {"init_lora_weights": "pissa"})
    assert distance(await likely("policy"), found) < 1e-3
    await sharded.push_weights(merged(checkpoints["a"], tensors), version=version + 1)
    assert distance(found, await likely()) < 0.15
    assert distance(found, base) > 0.5
    await sharded.unload_lora("policy")


@pytest.mark.parametrize("level", [1, 2])
async def test_two_ranks_sleep_and_wake_up(sharded: AsyncClient, checkpoints: dict[str, Path], level: int) -> None:
    """Each rank drops its shard and its slots of adapters: the served version and an adapter are there again after the
    wake-up, and so is what is pushed between the weights and the KV cache."""

    async def outputs() -> object:
        alone = await greedy_outputs(sharded)
        adapted = await sharded.generate(PROMPT, max_tokens=8, temperature=0.0, ignore_eos=True, lora_name="kept")
        return alone, adapted.token_ids

    version = (await sharded.get_weights()).weight_version
    await sharded.push_lora("kept", adapter(checkpoints["a"], seed=1), CONFIG)
    await sharded.push_weights(checkpoints["b"], version=version + 1)
    of_b = await outputs()
    await sharded.push_weights(checkpoints["a"], version=version + 2)
    of_a, live = await outputs(), (await sharded.get_weights(include_digests=True)).digests
    assert of_a != of_b
    asleep = await sharded.sleep(level=level)
    assert (asleep.phase, asleep.weights_discarded) == ("sleeping", level == 2)
    awake = await sharded.wake_up()
    assert (awake.phase, awake.weights_discarded) == ("running", False)
    assert await outputs() == of_a
    assert (await sharded.get_weights(include_digests=True)).digests == live
    await sharded.sleep(level=level)
    await sharded.wake_up(["weights"])
    await sharded.push_weights(checkpoints["b"], version=version + 3)
    await sharded.wake_up(["kv_cache"])
    assert await outputs() == of_b
    await sharded.unload_lora("kept")
