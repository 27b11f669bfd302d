"""A push into two tensor-parallel ranks."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from tests.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.engine.conftest import Reference
from tests.engine.test_push import greedy_outputs, outputs_of

BOTH_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
async def sharded(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    """A client of a daemon on checkpoint a with two ranks."""
    log = tmp_path_factory.mktemp("sharded") / "stderr"
    flags = ["--model", str(checkpoints["a"]), "--tensor-parallel-size", "2", *SMALL_ENGINE]
    process = DaemonProcess(flags, log, env=BOTH_CORES)
    try:
        process.wait_serving()
        async with AsyncClient(process.address) as client:
            yield client
    finally:
        process.stop()


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
