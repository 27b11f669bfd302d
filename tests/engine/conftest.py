"""Real engines, started once a session: an engine costs about 20 s."""

from collections.abc import AsyncIterator, Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from tests.engine.transfer_subject import FLAGS, TransferSubject
from tests.support import models
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.plain_vllm import Reference, plain_vllm
from tests.support.trainer_programs import tiny_model


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two tiny checkpoints, "a" and "b", of one architecture with different weights."""
    directory = tmp_path_factory.mktemp("checkpoints")
    a = models.tiny_qwen3(directory / "a", seed=0)
    return {"a": a, "b": models.perturbed(a, directory / "b", seed=1, scale=0.5)}


@pytest.fixture(scope="session")
def reference(checkpoints: dict[str, Path]) -> Callable[..., Reference]:
    """What plain vLLM says about checkpoint `name`."""

    @lru_cache
    def of(name: str, tensor_parallel_size: int = 1) -> Reference:
        return plain_vllm(checkpoints[name], tensor_parallel_size)

    return of


@pytest.fixture(scope="session")
def daemon(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon on checkpoint a. Tests that push leave it on a with `restored`."""
    log = tmp_path_factory.mktemp("daemon") / "stderr"
    process = DaemonProcess(["--model", str(checkpoints["a"]), *SMALL_ENGINE], log)
    try:
        yield process.wait_serving()
    finally:
        process.end()


@pytest.fixture(scope="session")
async def client(daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    """A client of the daemon."""
    async with AsyncClient(daemon.address) as connected:
        yield connected


@pytest.fixture
async def restored(client: AsyncClient, checkpoints: dict[str, Path]) -> AsyncIterator[None]:
    """Puts checkpoint a back after a test that pushes."""
    yield
    served = await client.get_weights()
    await client.push_weights(checkpoints["a"], version=served.weight_version + 1)


@pytest.fixture(scope="session")
async def transfer_subject(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TransferSubject]:
    """A daemon with a transfer backend of vLLM's, started on checkpoint a of its own."""
    directory = tmp_path_factory.mktemp("transfer")
    a = models.tiny_qwen3(directory / "a", seed=0, tie=False)
    b = models.perturbed(a, directory / "b", seed=1, scale=0.5)
    process = DaemonProcess(["--model", str(a), *SMALL_ENGINE, *FLAGS], directory / "stderr")
    try:
        async with AsyncClient(process.wait_serving().address) as connected:
            yield TransferSubject(process, connected, {"a": a, "b": b}, directory)
    finally:
        process.end()


@pytest.fixture
async def subject(transfer_subject: TransferSubject) -> TransferSubject:
    """The same with its workers connected, on checkpoint a, whose bytes are resident."""
    await transfer_subject.init()
    await transfer_subject.push("a")
    return transfer_subject


@pytest.fixture(scope="session")
def untied_b(transfer_subject: TransferSubject) -> Reference:
    """What plain vLLM says about its checkpoint b."""
    return plain_vllm(transfer_subject.checkpoints["b"])


@pytest.fixture(scope="session")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that the GRPO example trains: random weights, letters for words."""
    directory = tmp_path_factory.mktemp("learner")
    tiny_model.make_tiny_model(directory, seed=0)
    return directory


@pytest.fixture(scope="session")
def learner_daemon(learner: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon on it, in float32 as its trainer. Who uses it pushes what they need first."""
    flags = ["--model", str(learner), *SMALL_ENGINE, "--max-model-len", "512", "--dtype", "float32"]
    process = DaemonProcess(flags, tmp_path_factory.mktemp("learner_daemon") / "stderr")
    try:
        yield process.wait_serving()
    finally:
        process.end()


@pytest.fixture
async def learner_client(learner_daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    """A client of it."""
    async with AsyncClient(learner_daemon.address) as connected:
        yield connected
