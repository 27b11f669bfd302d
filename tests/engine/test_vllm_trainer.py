"""Trainers that are written against vLLM's weight-transfer API, unchanged but for an import."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from genserve.client import AsyncClient
from tests.engine.examples import WRITTEN_ADDRESS, block
from tests.engine.outputs import greedy_outputs, next_version, outputs_of
from tests.engine.transfer_subject import BACKEND, Digests, TransferSubject
from tests.support import models
from tests.support.daemon_process import DaemonProcess
from tests.support.plain_vllm import PROMPTS, Reference
from tests.support.warm import process

ROOT = Path(__file__).parents[2]
TRAINER = (ROOT / "clients" / "python" / "vllm_trainer.py").read_text()
GUIDE = ROOT / "docs" / "vllm_transfer.md"
IMPORT = "from genserve.integrations.vllm_trainer import GenserveTrainerInitInfo, GenserveWeightSyncClient"
LONG = pytest.mark.long(
    *("genserve/integrations", "clients/python/vllm_trainer.py", "docs/vllm_transfer.md"),
    *("tests/engine/file_transfer.py", "tests/engine/transfer_subject.py"),
)


async def run(program: str, *flags: str) -> str:
    """Runs a trainer in a process of its own; what it printed."""
    command = [sys.executable, "-c", program, *flags]
    done = await asyncio.to_thread(process.run, command, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def named(digests: Digests) -> dict[str, str]:
    """As the reference has them."""
    return {f"{rank} {name}": value for (rank, name), value in digests.items()}


async def test_a_trainer_on_vllms_api_pushes_when_one_import_says_so(
    client: AsyncClient,
    daemon: DaemonProcess,
    restored: None,
    checkpoints: dict[str, Path],
    reference: Callable[..., Reference],
) -> None:
    """The daemon, which was started without anything for it, serves what the trainer has as a cold start on it would,
    labels tokens with its version, and has its bytes."""
    assert [line for line in TRAINER.splitlines() if line.startswith(("import genserve", "from genserve"))] == [IMPORT]
    version = await next_version(client)
    await run(TRAINER, "--target", daemon.address, "--model", str(checkpoints["b"]), "--steps", "0")
    served = await client.get_weights(include_digests=True)
    assert (served.weight_version, served.resident) == (version, True)
    assert named(served.digests) == reference("b")["digests"]
    assert await greedy_outputs(client) == outputs_of(reference("b"))
    (span,) = (await client.generate(PROMPTS[0], max_tokens=4, ignore_eos=True)).sequences[0].weight_spans
    assert (span.version, span.start, span.end) == (version, 0, 4)


async def test_what_it_trains_is_served_bit_for_bit(
    client: AsyncClient, daemon: DaemonProcess, restored: None, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Every step is a version."""
    version = await next_version(client)
    flags = ("--target", daemon.address, "--model", str(checkpoints["a"]), "--steps", "1", "--save", str(tmp_path))
    assert "step 0: loss" in await run(TRAINER, *flags)
    pulled = await client.pull_weights()
    assert pulled.weight_version == version + 1
    served, saved, before = pulled.state_dict(), models.load_tensors(tmp_path), models.load_tensors(checkpoints["a"])
    assert served.keys() == saved.keys() == before.keys()
    assert all(torch.equal(served[name], tensor) for name, tensor in saved.items())
    assert not all(torch.equal(served[name], tensor) for name, tensor in before.items())


async def test_a_tensor_that_the_model_lacks_is_named(client: AsyncClient, daemon: DaemonProcess) -> None:
    """Before a byte has moved; the served version goes on."""
    version = (await client.get_weights()).weight_version
    program = f"""
import torch
from vllm.distributed.weight_transfer import ModuleSource, TrainerWeightTransferEngine, WeightTransferTrainerFactory
{IMPORT}
from genserve.errors import ManifestMismatchError

with GenserveWeightSyncClient({daemon.address!r}) as client:
    source = ModuleSource(torch.nn.ModuleDict({{"stranger": torch.nn.Linear(2, 2)}}))
    trainer = WeightTransferTrainerFactory.trainer_init(GenserveTrainerInitInfo(rank=0), client=client, source=source)
    assert isinstance(trainer, TrainerWeightTransferEngine)
    try:
        trainer.send_weights()
    except ManifestMismatchError as error:
        print([violation.field for violation in error.violations])
"""
    assert "stranger.weight" in await run(program)
    state = (await client.status()).state
    assert (state.weight_version, state.phase) == (version, "running")


@LONG  # test_vllm_transfer has the four calls
async def test_the_same_trainer_drives_an_engine_of_vllms_own(subject: TransferSubject, untied_b: Reference) -> None:
    """Through vLLM's four calls over gRPC: what is live is what a cold start would have, by its version."""
    client, version = subject.client, await subject.next_version()
    own = IMPORT.replace("genserve.integrations.vllm_trainer", "tests.engine.file_transfer")
    program, b = TRAINER.replace(IMPORT, own), str(subject.checkpoints["b"])
    await run(program, "--target", subject.daemon.address, "--model", b, "--steps", "0")
    served = await client.get_weights(include_digests=True)
    assert (served.weight_version, served.resident) == (version, False)
    assert named(served.digests) == untied_b["digests"]
    assert await greedy_outputs(client) == outputs_of(untied_b)
    (span,) = (await client.generate(PROMPTS[0], max_tokens=4, ignore_eos=True)).sequences[0].weight_spans
    assert (span.version, span.start, span.end) == (version, 0, 4)
    info = await client.server_info()
    assert (info.weight_transfer, "weight_transfer" in info.features) == (BACKEND, True)


@LONG
@pytest.mark.parametrize("word", ["vllm_trainer", "vllm_sync"])
async def test_an_example_of_the_guide_runs(subject: TransferSubject, untied_b: Reference, word: str) -> None:
    """As it stands, but for the address; `model` and `init_info` are the trainer's."""
    version = await subject.next_version()
    given = f"""
from pathlib import Path
from tests.support import models
from tests.engine.file_transfer import GenserveTrainerInitInfo as OwnInitInfo

class model:
    named_parameters = staticmethod(lambda: models.load_tensors(Path({str(subject.checkpoints["b"])!r})).items())

init_info = OwnInitInfo(rank=0)
"""
    await run(given + block("python", word, GUIDE).replace(WRITTEN_ADDRESS, subject.daemon.address))
    served = await subject.client.get_weights(include_digests=True)
    assert (served.weight_version, served.resident) == (version, word == "vllm_trainer")
    assert named(served.digests) == untied_b["digests"]
