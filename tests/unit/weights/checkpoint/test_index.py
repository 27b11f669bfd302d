"""The checkpoint's index, read from files that safetensors has written."""

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from genserve.tensors.manifest import Manifest, TensorSpec, structural_issues
from genserve.tensors.safetensors import MAX_HEADER_BYTES, CheckpointFileError
from genserve.weights.checkpoint.files import CheckpointFiles
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor, checkpoint_issues
from genserve.weights.push_admission import mismatch

EMBED = {"model.embed_tokens.weight": np.zeros((4, 2), np.float16)}
HEAD = {"lm_head.weight": np.zeros((4, 2), np.float16)}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def test_single_file_is_read(tmp_path: Path) -> None:
    """Names, types, shapes and sizes as safetensors wrote them; the manifest is end to end in order of the names."""
    tensors = {"z": np.zeros((2, 3), np.float32), "a": np.zeros((), np.int64), **EMBED}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    index = CheckpointIndex.read(CheckpointFiles.open(tmp_path))
    assert index.tensors["z"] == CheckpointTensor("F32", (2, 3), 24)
    assert index.tensors["a"] == CheckpointTensor("I64", (), 8)
    assert index.total_bytes == 24 + 8 + 16
    manifest = index.as_manifest()
    assert [(t.name, t.offset) for t in manifest.tensors] == [("a", 0), ("model.embed_tokens.weight", 8), ("z", 24)]
    assert manifest.total_bytes == index.total_bytes
    assert structural_issues(manifest) == []


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    """Only the files that the index names: others in the directory are none of the model's."""
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros(2, np.float32)}, tmp_path / "model-2.safetensors")
    save_file({"c": np.zeros(2, np.float32)}, tmp_path / "adapter.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert set(CheckpointIndex.read(CheckpointFiles.open(tmp_path)).tensors) == {"a", "b"}


@pytest.mark.parametrize(
    ("tensors", "config", "tied"),
    [
        (EMBED, {"tie_word_embeddings": True}, TIED),
        (EMBED | HEAD, {"tie_word_embeddings": True}, TIED),
        (EMBED, {"text_config": {"tie_word_embeddings": True}}, TIED),
        (EMBED, {}, TIED),
        (EMBED | HEAD, {}, {}),
        (EMBED | HEAD, {"tie_word_embeddings": False}, {}),
        (EMBED, {"tie_word_embeddings": False}, {}),
    ],
)
def test_tied_head_is_known(
    tmp_path: Path, tensors: dict[str, Any], config: dict[str, Any], tied: dict[str, str]
) -> None:
    """As config.json says; where it is silent, a checkpoint without a head must be tied."""
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert CheckpointIndex.read(CheckpointFiles.open(tmp_path)).tied == tied


def entry(begin: int, end: int) -> dict[str, Any]:
    """A tensor of bytes."""
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


def file_of(header: dict[str, Any], data_bytes: int) -> bytes:
    """With a header and so much behind it."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a safetensors file"),
        (struct.pack("<Q", 1 << 62) + b"{}", "is not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 4) + b"nope", "Expecting value"),
        (struct.pack("<Q", 8) + b'{"a":{}}', "a: needs dtype, shape"),
        (file_of({"a": entry(0, 1), "b": entry(2, 3)}, 3), "b: begins at 2, the one before it ends at 1"),
        (file_of({"a": entry(0, 1)}, 2), "2 bytes of data, 1 in the header"),
        (file_of({"a": entry(0, 1), "b": entry(1, 2)}, 1), "may be truncated"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + bytes(100), "is not a safetensors file"),
    ],
)
def test_file_that_is_none_is_told_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    """The error names the file and what is wrong; no header is read whose length cannot be."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointFileError, match=says) as error:
        CheckpointIndex.read(CheckpointFiles.open(tmp_path))
    assert str(path) in str(error.value)


def test_directory_without_weights_is_reported(tmp_path: Path) -> None:
    """And so is an index that points out of its directory."""
    with pytest.raises(CheckpointFileError, match="no safetensors file"):
        CheckpointIndex.read(CheckpointFiles.open(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(CheckpointFileError, match="not the name of"):
        CheckpointIndex.read(CheckpointFiles.open(tmp_path))


def test_far_more_tensors_than_there_are_can_be_named() -> None:
    """Four times as many and a thousand: a mistake is answered tensor by tensor."""
    index = CheckpointIndex({name: CheckpointTensor("U8", (1,), 1) for name in "abc"})
    assert index.max_tensors == 4 * 3 + 1024
    names = [f"x{number}" for number in range(index.max_tensors)]
    specs = tuple(TensorSpec(name, "U8", (1,), place, 1) for place, name in enumerate(names))
    fits = checkpoint_issues(Manifest(specs, len(specs)), index)
    assert [issue.tensor for issue in fits if "missing" in issue.description] == ["a", "b", "c"]


def test_what_the_engine_does_not_load_may_be_left_out() -> None:
    """Of the rest each is named; and what may be left out has to fit where it comes."""
    tensors = dict.fromkeys("abc", CheckpointTensor("U8", (1,), 1))
    index = CheckpointIndex(tensors, unused=frozenset("bc"))

    def issues(**shapes: tuple[int, ...]) -> list[tuple[str, str]]:
        pushed = Manifest.end_to_end((name, "U8", shape, 1) for name, shape in shapes.items())
        return [(issue.tensor, issue.description) for issue in checkpoint_issues(pushed, index)]

    assert issues(a=(1,)) == issues(a=(1,), b=(1,)) == []
    assert issues(b=(1,)) == [("a", "is missing")]
    assert [name for name, _ in issues(a=(1,), b=(1, 1))] == ["b"]


def test_tensors_that_do_not_fit_are_reported_with_both_sides() -> None:
    """Unknown, of another shape, or of a type that a cast would change the meaning of."""
    index = CheckpointIndex({"a": CheckpointTensor("F8_E4M3", (2,), 2), "b": CheckpointTensor("F32", (2,), 8)})

    def issues(*specs: TensorSpec) -> list[tuple[str, str]]:
        return [(issue.tensor, issue.description) for issue in checkpoint_issues(Manifest(specs, 10, True), index)]

    assert issues(TensorSpec("b", "BF16", (2,), 0, 4), TensorSpec("a", "F8_E4M3", (2,), 4, 2)) == []
    ((name, told),) = issues(TensorSpec("b", "F32", (1, 2), 0, 8))
    assert name == "b" and "[1, 2]" in told and "[2]" in told
    for dtype in ("BF16", "F8_E5M2"):
        ((name, told),) = issues(TensorSpec("a", dtype, (2,), 0, 4))
        assert name == "a" and dtype in told and "F8_E4M3" in told


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """Which of the two is served could not be said."""
    for number in (1, 2):
        save_file({"a": np.zeros(2, np.float32)}, tmp_path / f"model-{number}.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointFileError, match="'a'"):
        CheckpointIndex.read(CheckpointFiles.open(tmp_path))


def test_a_tensor_beyond_the_end_of_its_file_is_refused(tmp_path: Path) -> None:
    """A download that was cut off; one that ends with its file is whole."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert CheckpointIndex.read(CheckpointFiles.open(tmp_path)).tensors["a"].position == 8 + len(header)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(3))
    with pytest.raises(CheckpointFileError):
        CheckpointIndex.read(CheckpointFiles.open(tmp_path))


@pytest.mark.parametrize("content", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}])
def test_an_index_without_a_map_is_reported(tmp_path: Path, content: dict[str, Any]) -> None:
    """By its name."""
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointFileError, match="weight_map") as error:
        CheckpointFiles.open(tmp_path)
    assert str(path) in str(error.value)


LAYERS = [f"layers.{number}.{part}.weight" for number in range(12) for part in ("self_attn.q_proj", "mlp.up_proj")]
NAMES = ["lm_head.weight", "model.embed_tokens.weight", *(f"model.{name}" for name in LAYERS), "model.norm.weight"]
OF_TEXT = [name.replace("model.", "model.language_model.") for name in NAMES]


def checkpoint(names: list[str]) -> CheckpointIndex:
    return CheckpointIndex(dict.fromkeys(names, CheckpointTensor("F32", (2,), 8)))


def message(pushed: list[str], served: list[str]) -> str:
    """What a push of tensors with these names is told."""
    return mismatch(checkpoint_issues(checkpoint(pushed).as_manifest(), checkpoint(served))).message


INSIDE = [name.replace("mlp.", "_checkpoint_wrapped_module.mlp.") for name in NAMES]
MERGED = [f"base_model.model.{name.replace('q_proj', 'q_proj.base_layer')}" for name in NAMES]
FUSED, EXPERT = "model.layers.0.mlp.experts.down_proj", "model.layers.0.mlp.experts.0.down_proj.weight"
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"


@pytest.mark.parametrize(
    ("pushed", "served", "says"),
    [
        ([f"_orig_mod.{name}" for name in NAMES], NAMES,
         "begins every name with '_orig_mod.': pass rename=..., or push model._orig_mod"),
        ([f"module.{name}" for name in NAMES], NAMES,
         "begins every name with 'module.': pass rename=..., or push model.module"),
        ([f"actor.net.{name}" for name in NAMES], NAMES, "begins every name with 'actor.net.': pass rename=..."),
        ([f"module._orig_mod.{name}" for name in NAMES], NAMES, "with 'module._orig_mod.': pass rename=..."),
        (OF_TEXT, NAMES, "with 'model.language_model.' where the checkpoint has 'model.': pass rename=..."),
        (NAMES, OF_TEXT, "with 'model.' where the checkpoint has 'model.language_model.': pass rename=..."),
        ([name.removeprefix("model.") for name in NAMES], NAMES,
         "begins no name with 'model.', as the checkpoint does: pass rename=..."),
        (INSIDE, NAMES, "has '_checkpoint_wrapped_module.' in names: pass rename=..., or push the module"),
        (MERGED, NAMES, f"has PEFT's names, such as {MERGED[0]!r}: push the module, or pass rename=..."),
        ([*NAMES[:2], FUSED], [*NAMES[:2], EXPERT],
         f"has the experts of a layer in one tensor, such as {FUSED!r}: push the module, which is converted"),
        ([f"_orig_mod.{name}" for name in [*NAMES[:2], FUSED]], [*NAMES[:2], EXPERT],
         f"in one tensor, such as '_orig_mod.{FUSED}': push the module, which is converted"),
        ([FUSED.removeprefix("model.")], [EXPERT], "push the module, which is converted"),
        ([*NAMES[:3], *(f"actor.{name}" for name in NAMES[3:])], NAMES,
         f"begins names such as 'actor.{NAMES[3]}' with 'actor.': pass rename=..."),
        ([*NAMES[:3], *(name.removeprefix("model.") for name in NAMES[3:])], NAMES,
         f"does not begin names such as '{NAMES[3].removeprefix('model.')}' with 'model.', as the checkpoint does: "
         "pass rename=..."),
        ([*NAMES, A], NAMES, f"such as {A!r}: push it with push_lora, or merge it, and push the module"),
    ],
)  # fmt: skip
def test_one_thing_that_explains_every_name_is_said_in_one_sentence(
    pushed: list[str], served: list[str], says: str
) -> None:
    """And nothing else is."""
    said = message(pushed, served)
    assert said.endswith(says)
    assert ";" not in said


def test_tensors_that_lack_beside_it_do_not_hide_the_cause() -> None:
    """They are told when the names are right."""
    assert "_orig_mod" in message([f"_orig_mod.{name}" for name in NAMES[3:]], NAMES)


@pytest.mark.parametrize(
    "pushed",
    [
        [f"_orig_mod.{name}" for name in NAMES] + ["value_head.weight"],
        [f"a.{name}" if name < "model.layers.5" else f"b.{name}" for name in NAMES],
        [*NAMES, "_orig_mod.model.norm.weight"],
        ["x", "y"],
        NAMES[:-1],
        [*NAMES, f"other{FUSED}"],
    ],
)
def test_where_it_would_be_two_things_or_none_the_tensors_are_named(pushed: list[str]) -> None:
    """The first of each kind."""
    assert "is missing" in message(pushed, NAMES) or "is not in the checkpoint" in message(pushed, NAMES)


SHIFTED = [re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) + 1}", name) for name in NAMES]


@pytest.mark.parametrize(
    ("pushed", "partial"),
    [
        (SHIFTED, False),  # layers are counted from 1: the renaming that is advised permutes them
        ([name.replace("layers.3.", "layers.12.") for name in NAMES if "layers.3." in name], True),
        (["value_head.weight"], True),
        (["model.layers.0.self_attn.v_proj.weight"], True),
    ],
)
def test_what_is_another_layer_or_module_is_not_the_beginning_of_a_name(pushed: list[str], partial: bool) -> None:
    """Who renamed it as advised would overwrite another layer of the served model, and be told that all is well."""
    manifest = replace(checkpoint(pushed).as_manifest(), partial=partial)
    issues = checkpoint_issues(manifest, checkpoint(NAMES))
    assert issues
    assert "rename" not in mismatch(issues).message
