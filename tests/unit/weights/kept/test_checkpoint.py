"""What is written is a checkpoint for everybody."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from genserve.weights.kept.checkpoint import digest_of, num_threads, open_kept, write_checkpoint
from tests.unit.weights.kept.versions import (
    MANIFEST,
    OTHER_FILES,
    SMALL_FILES,
    bytes_of,
    digest_of_version,
    model_files,
    text_of,
)


@pytest.mark.parametrize("num_cores", [1, 64])
@pytest.mark.parametrize(("shard_bytes", "num_shards"), [(1 << 30, 1), ((1 << 14) + (1 << 17), 2), (1, 3)])
def test_its_files_are_read_by_safetensors(
    tmp_path: Path, shard_bytes: int, num_shards: int, num_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one file or several, which an index names; the digest is that of the tensors, also where several threads
    write."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    assert num_threads() == (4 if num_cores == 64 else 1)
    data, target = memoryview(bytes_of(1)), tmp_path / "target"
    target.mkdir()
    files = model_files(tmp_path / "model")
    digest = write_checkpoint(target, MANIFEST, lambda start, end: data[start:end], files, shard_bytes)
    assert digest == digest_of_version(1) == digest_of(open_kept(target))
    shards = sorted(target.glob("*.safetensors"))
    assert len(shards) == num_shards
    found = {}
    for shard in shards:
        with safe_open(shard, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name).flatten()
                found[name] = (tensor.view(torch.uint8).numpy().tobytes(), shard.name)
    assert {name: each for name, (each, _) in found.items()} == {
        each.name: bytes(data[each.offset : each.offset + each.length]) for each in MANIFEST.tensors
    }
    if num_shards > 1:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {name: shard for name, (_, shard) in found.items()}
        assert index["metadata"] == {"total_size": MANIFEST.total_bytes}


def test_what_is_no_weights_is_copied(tmp_path: Path) -> None:
    """The configuration, the tokenizer and code; neither weights nor other checkpoints."""
    data, target = memoryview(bytes_of(1)), tmp_path / "target"
    target.mkdir()
    write_checkpoint(target, MANIFEST, lambda start, end: data[start:end], model_files(tmp_path / "model"))
    for name in SMALL_FILES:
        assert (target / name).read_text() == text_of(name)
    assert not any((target / name).exists() for name in OTHER_FILES if name != "model.safetensors")
