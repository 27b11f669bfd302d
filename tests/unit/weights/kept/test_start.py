"""What is kept is served from the start."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from genserve.tensors.manifest import Manifest, TensorSpec
from genserve.tensors.safetensors import StoredTensor, write_safetensors
from genserve.weights.checkpoint.index import CheckpointTensor
from genserve.weights.checkpoint.version_zero import OpenedCheckpoint, open_checkpoint
from genserve.weights.kept.directory import KeptError
from genserve.weights.kept.keeper import Keeper
from genserve.weights.kept.start import find_kept, start_keeping
from genserve.weights.push.types import PushHeader
from tests.unit.weights.conftest import CHECKPOINT, Rig, contents, header, open_rig, tensors, weights

ONLY_B = Manifest((TensorSpec("b", "BF16", (8,), 0, 16),), 16, partial=True)


def model(directory: Path, shape: tuple[int, ...] = (4,)) -> OpenedCheckpoint:
    """The checkpoint that the engine loads."""
    directory.mkdir(exist_ok=True)
    data = memoryview(bytes(4 * shape[0]) + weights(0)[16:])
    stored = [StoredTensor("a", "F32", shape, data[:-16]), StoredTensor("b", "BF16", (8,), data[-16:])]
    write_safetensors(directory / "model.safetensors", stored)
    (directory / "config.json").write_text("{}")
    opened = open_checkpoint(directory, lambda line: None)
    assert opened is not None
    return opened


async def start(rig: Rig, path: Path, said: list[str] | None = None) -> Keeper:
    """As a daemon does it."""
    opened = model(path / "model")
    kept = find_kept(str(path / "kept"), opened, ([] if said is None else said).append)
    keeper = await start_keeping(kept, opened, opened.index, rig.engine, rig.resident, rig.applier)
    assert keeper is not None
    return keeper


async def keep(path: Path, *pushes: tuple[PushHeader, bytes | None]) -> None:
    """A daemon that takes these pushes, and ends."""
    (path / "rig").mkdir(exist_ok=True)
    async with open_rig(path / "rig") as rig:
        keeper = await start(rig, path)
        rig.background.append(asyncio.create_task(keeper.run()))
        for opened, data in pushes:
            await rig.push(opened, data)
        await keeper.close()
        assert keeper.num_failed == 0
        rig.background.pop().cancel()


async def test_the_version_of_the_daemon_before_is_served(tmp_path: Path) -> None:
    """With its number, its push and its digest; its bytes complete a partial push. The engine runs, and is told in the
    first lines."""
    await keep(tmp_path, (header("p7", 7, content_digest=contents(7)), None))
    async with open_rig(tmp_path / "rig") as rig:
        said: list[str] = []
        await start(rig, tmp_path, said)
        assert "version 7" in said[0]
        assert (rig.engine.live, rig.engine.weight_version) == (tensors(7), 7)
        assert rig.engine.running and not rig.engine.prepared
        assert (rig.resident.push_id, rig.resident.content_digest) == ("p7", contents(7))
        await rig.push(PushHeader("p8", 8, manifest=ONLY_B), weights(8)[16:])
        assert rig.engine.live == {"a": weights(7)[:16], "b": weights(8)[16:]}


async def test_what_is_kept_has_an_origin_as_long_as_its_files_are_the_same(tmp_path: Path) -> None:
    """A pull goes on after the next start, and not with another version 7."""
    origins = []
    for pushes in ([(header("p7", 7), None)], [], [(header("q7", 7, force=True), weights(1))]):
        await keep(tmp_path, *pushes)
        async with open_rig(tmp_path / "rig") as rig:
            await start(rig, tmp_path)
            origins.append(rig.resident.require().origin)
    assert origins[0] == origins[1] != origins[2] and origins[0]


async def test_a_partial_push_is_kept_whole(tmp_path: Path) -> None:
    """What it does not bring is that of the version before."""
    await keep(tmp_path, (header("p1", 1), None), (PushHeader("p2", 2, manifest=ONLY_B), weights(2)[16:]))
    async with open_rig(tmp_path / "rig") as rig:
        await start(rig, tmp_path)
        assert rig.engine.live == {"a": weights(1)[:16], "b": weights(2)[16:]}
        assert (rig.resident.push_id, rig.engine.weight_version) == ("p2", 2)


async def test_nothing_is_kept_yet(tmp_path: Path) -> None:
    """The checkpoint is served, and the lines say so."""
    async with open_rig(tmp_path) as rig:
        said: list[str] = []
        await start(rig, tmp_path, said)
        assert rig.engine.live == tensors(0) and "the checkpoint is served" in said[0]


async def test_another_model_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    """With the tensor that differs."""
    await keep(tmp_path, (header("p1", 1), None))
    other = model(tmp_path / "other", shape=(5,))
    with pytest.raises(KeptError, match="does not belong to --model: 'a' has shape"):
        find_kept(str(tmp_path / "kept"), other, lambda line: None)


async def test_a_version_without_a_tensor_that_the_engine_loads_is_refused(tmp_path: Path) -> None:
    """What the engine loads is known when it has started."""
    await keep(tmp_path, (header("p1", 1), None))
    opened = model(tmp_path / "model")
    kept = find_kept(str(tmp_path / "kept"), opened, lambda line: None)
    more = replace(opened.index, tensors={**CHECKPOINT.tensors, "c": CheckpointTensor("U8", (1,), 1)})
    async with open_rig(tmp_path / "rig") as rig:
        with pytest.raises(KeptError, match="'c' is missing"):
            await start_keeping(kept, opened, more, rig.engine, rig.resident, rig.applier)
        assert rig.engine.live == tensors(0)


async def test_damaged_files_are_not_served(tmp_path: Path) -> None:
    """Every byte is compared with the digest of the record."""
    await keep(tmp_path, (header("p1", 1), None))
    file = tmp_path / "kept" / "current" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    async with open_rig(tmp_path / "rig") as rig:
        with pytest.raises(KeptError, match=r"SHA-256 .*: move .*current away"):
            await start(rig, tmp_path)
        assert rig.engine.live == tensors(0)
        file.write_bytes(data[:-1])
        with pytest.raises(KeptError, match=r"move .*current away"):
            await start(rig, tmp_path)


async def test_an_engine_that_does_not_take_the_version_ends_the_start(tmp_path: Path) -> None:
    """With the files that it did not take."""
    await keep(tmp_path, (header("p1", 1), None))
    async with open_rig(tmp_path / "rig") as rig:
        rig.engine.fails["commit_weights"] = RuntimeError("it does not fit")
        with pytest.raises(KeptError, match=r"current.*it does not fit"):
            await start(rig, tmp_path)


async def test_files_of_the_model_are_needed(tmp_path: Path) -> None:
    """A checkpoint has a configuration and a tokenizer."""
    async with open_rig(tmp_path) as rig:
        kept = find_kept(str(tmp_path / "kept"), None, lambda line: None)
        with pytest.raises(KeptError, match="files of --model"):
            await start_keeping(kept, None, None, rig.engine, rig.resident, rig.applier)


async def test_what_is_not_kept_is_told_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Adapters, and what vLLM transfers, if the engine takes any."""
    async with open_rig(tmp_path) as rig:
        await start(rig, tmp_path)
        assert not caplog.records
        rig.engine.max_loras, rig.engine.backend = 2, "nccl"
        await start(rig, tmp_path)
        assert "adapters" in caplog.text and "vLLM's own weight transfer" in caplog.text
