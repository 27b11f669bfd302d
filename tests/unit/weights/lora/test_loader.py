"""Adapters: what is refused before anybody loads it, and the files that vLLM reads."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from genserve.client.weights.layout import ByteSpace
from genserve.client.weights.sources import tensor_sources
from genserve.control.conditions import Phase
from genserve.errors import (
    DeadlineError,
    DrainingError,
    EngineDeadError,
    GenserveError,
    InvalidFieldError,
    UnsupportedError,
)
from genserve.memory.arena import Arena
from genserve.tensors.manifest import Manifest
from genserve.tensors.safetensors import CheckpointFileError
from genserve.weights.checkpoint import CheckpointIndex, CheckpointTensor
from genserve.weights.checkpoint_files import CheckpointFile
from genserve.weights.lora.config import LoraConfig, lora_issues
from genserve.weights.lora.files import LoraFiles, sweep
from genserve.weights.push.types import LoraAdapter, PushAction, PushHeader, PushState
from tests.support.phases import enter_phase
from tests.unit.weights.conftest import Rig, num_arenas, send
from tests.unit.weights.conftest import header as weights_header

A, B = "base_model.model.layers.0.q.lora_A.weight", "base_model.model.layers.0.q.lora_B.weight"
TENSORS = {A: torch.arange(8.0).reshape(2, 4), B: torch.arange(12.0).reshape(6, 2).to(torch.bfloat16)}
MODEL = CheckpointIndex({"layers.0.q.weight": CheckpointTensor("BF16", (6, 4), 48)})
CONFIG = json.dumps({"r": 2, "lora_alpha": 4, "target_modules": ["q"]})


def space(tensors: dict[str, torch.Tensor]) -> tuple[Manifest, bytes]:
    """The manifest and the bytes of a push."""
    sources = tensor_sources(tensors, tied_once=False)
    data = b"".join(bytes(source.read()) for source in sorted(sources, key=lambda source: source.name))
    return ByteSpace(sources).manifest(partial=False), data


def header(**fields: Any) -> PushHeader:
    """Of a push of TENSORS as "policy"."""
    return PushHeader("lora", 0, manifest=space(TENSORS)[0], lora=LoraAdapter("policy", CONFIG), **fields)


@pytest.mark.parametrize(
    ("changes", "issue"),
    [
        ({}, None),
        ({B: None}, (A, "missing its B")),
        ({A: None}, (B, "missing its A")),
        ({B: torch.zeros(6, 3)}, (A, "has rank 2, and its B 3")),
        ({A: torch.zeros(2, 5)}, (A, "has 5 columns, the module's weight has 4")),
        ({B: torch.zeros(7, 2)}, (B, "has 7 rows, the module's weight has 6")),
        ({name.replace("0", "9"): tensor for name, tensor in TENSORS.items()}, (A.replace("0", "9"), "does not have")),
        ({"layers.0.q.weight": torch.zeros(6, 4)}, ("layers.0.q.weight", "not a tensor of an adapter")),
        ({"base_model.model.score.weight": torch.zeros(2)}, None),
    ],
)
def test_tensors_that_are_no_adapter(changes: dict[str, torch.Tensor | None], issue: tuple[str, str] | None) -> None:
    """Named, with what is wrong."""
    tensors = {name: tensor for name, tensor in (TENSORS | changes).items() if tensor is not None}
    issues = lora_issues(space(tensors)[0], MODEL, LoraConfig.parse(CONFIG, 8, ""))
    if issue is None:
        assert issues == []
    else:
        assert issues[0].tensor == issue[0]
        assert issue[1] in issues[0].description


def test_modules_under_other_names_are_left_to_vllm() -> None:
    """Where no name is the checkpoint's, or there is no checkpoint, only pairs and ranks are asked for."""
    renamed = {name.replace("layers", "language_model.layers"): tensor for name, tensor in TENSORS.items()}
    config = LoraConfig.parse(CONFIG, 8, "")
    assert lora_issues(space(renamed)[0], MODEL, config) == []
    assert lora_issues(space({A: TENSORS[A]})[0], None, config) != []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"r": 2}', "lacks lora_alpha, target_modules"),
        (CONFIG.replace("2", '"2"'), "whole numbers"),
        (CONFIG.replace("2", "0"), "whole numbers"),
        (CONFIG.replace("2", "16"), "has rank 16, the daemon runs with --max-lora-rank 8"),
        (CONFIG.replace("}", ', "rank_pattern": {"q": 32}}'), "has rank 32"),
    ],
)
def test_configurations_that_cannot_be(text: str, words: str) -> None:
    """The error has the path of the field."""
    with pytest.raises(InvalidFieldError, match=words) as caught:
        LoraConfig.parse(text, 8, "header.lora.config")
    assert caught.value.violations[0].field == "header.lora.config"


def test_files_are_what_safetensors_reads() -> None:
    """Links to memory, which are gone when they are closed, and with them the memory."""
    arenas, (tensors, data) = num_arenas(), space(TENSORS)
    staged = Arena.allocate(len(data))
    staged.write(0, data)
    files = LoraFiles.of_push(LoraConfig.parse(CONFIG, 8, ""), tensors, staged, "p")
    staged.close()
    loaded = load_file(Path(files.directory) / "adapter_model.safetensors")
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    assert (Path(files.directory) / "adapter_config.json").read_text() == CONFIG
    assert all(path.is_symlink() for path in Path(files.directory).iterdir())
    files.close()
    files.close()
    assert not Path(files.directory).exists()
    assert num_arenas() == arenas


def test_files_of_killed_daemons_are_removed(tmp_path: Path) -> None:
    """Those of others that live are not."""
    dead, alive, foreign = (f"genserve-lora-{pid}-x" for pid in ("4194305", os.getpid(), "other"))
    for name in (dead, alive, foreign):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").symlink_to("/proc/4194305/fd/3")
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {alive, foreign}


async def test_a_pushed_adapter_is_loaded(rig: Rig) -> None:
    """In pieces, resumed, staged and committed; a repeat answers the same, and no weight has changed."""
    rig.engine.max_loras, data = 1, space(TENSORS)[1]
    opened = replace(header(action=PushAction.STAGE), attempt="a")
    stream = await rig.registry.open(opened)
    send(stream, data, 0, 10)
    stream.detach()
    assert rig.registry.report("lora").push.missing == ((10, len(data)),)
    stream = await rig.registry.open(opened)
    send(stream, data, 10)
    assert (await stream.finish()).push.state is PushState.STAGED
    stream.detach()
    assert rig.engine.loras.files == {}
    outcome = await rig.registry.commit("lora", header().apply)
    assert (outcome.push.state, outcome.push.lora_name, rig.engine.weight_version) == (PushState.APPLIED, "policy", 0)
    assert await rig.registry.commit("lora", header().apply) == outcome
    loaded = load_file(Path(rig.engine.loras.files["policy"].directory) / "adapter_model.safetensors")
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    assert rig.engine.calls == ["load_lora policy"]
    rig.engine.loras.unload("policy")


async def test_the_time_of_an_adapter_is_told_step_by_step(rig: Rig) -> None:
    """Nothing is paused for it, and no version comes of it."""
    rig.engine.max_loras = 1
    began_s = time.perf_counter()
    applied = (await rig.push(header(), space(TENSORS)[1])).applied
    elapsed_s = time.perf_counter() - began_s
    assert applied is not None
    assert [timing.step for timing in applied.timings] == ["receive", "verify", "prepare", "commit"]
    assert all(0 < timing.duration_s < elapsed_s for timing in applied.timings)
    assert (applied.previous_version, applied.active_version, applied.paused_s) == (0, 0, 0.0)
    assert (applied.requests_kept, applied.requests_aborted) == (0, 0)
    rig.engine.loras.unload("policy")


async def test_an_adapter_leaves_the_room_of_the_next_version_alone(rig: Rig) -> None:
    """The two arenas of versions take turns; an adapter has memory of its own."""
    for version in (1, 2):
        await rig.push(weights_header(f"p{version}", version))
    rig.engine.max_loras, before = 1, num_arenas()
    await rig.push(header(), space(TENSORS)[1])
    assert num_arenas() == before + 2  # the files of the adapter
    rig.engine.loras.unload("policy")
    assert num_arenas() == before


async def test_an_adapter_that_cannot_be_loaded_stays_staged(rig: Rig) -> None:
    """Nothing is lost: a commit tries again."""
    rig.engine.max_loras, rig.engine.fails["load_lora"] = 1, RuntimeError("no room")
    with pytest.raises(RuntimeError, match="no room"):
        await rig.push(header(), space(TENSORS)[1])
    assert rig.registry.report("lora").push.state is PushState.FAILED
    assert (await rig.registry.commit("lora", header().apply)).push.state is PushState.APPLIED
    rig.engine.loras.unload("policy")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"weight_version": 1}, "header.weight_version"),
        ({"expected_version": 0}, "header.expected_version"),
        ({"lora": LoraAdapter("", CONFIG)}, "header.lora.lora_name"),
        ({"lora": LoraAdapter("policy", "{}")}, "header.lora.config"),
    ],
)
async def test_headers_that_cannot_be(rig: Rig, fields: dict[str, Any], field: str) -> None:
    """The error has the path of the field."""
    rig.engine.max_loras = 1
    fields = {"push_id": "lora", "weight_version": 0, "manifest": space(TENSORS)[0], "lora": header().lora} | fields
    with pytest.raises(InvalidFieldError) as caught:
        await rig.registry.open(PushHeader(**fields))
    assert caught.value.violations[0].field == field


async def test_without_the_flag_there_are_no_adapters(rig: Rig) -> None:
    """It is named."""
    with pytest.raises(UnsupportedError, match="--enable-lora"):
        await rig.registry.open(header())


async def test_a_directory_is_read_once(rig: Rig, tmp_path: Path) -> None:
    """And checked as a push is."""
    rig.engine.max_loras = 1
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(CONFIG)
    loaded = await rig.loras.load_directory("policy", str(tmp_path), 5.0)
    assert (loaded.name, loaded.rank, loaded.source) == ("policy", 2, str(tmp_path))
    (tmp_path / "adapter_model.safetensors").unlink()
    assert load_file(Path(rig.engine.loras.files["policy"].directory) / "adapter_model.safetensors").keys() == {A, B}
    rig.loras.unload("policy")
    with pytest.raises(InvalidFieldError, match=r"no adapter_model\.safetensors"):
        await rig.loras.load_directory("policy", str(tmp_path), 5.0)


async def test_a_directory_whose_tensors_have_another_rank_is_refused(rig: Rig, tmp_path: Path) -> None:
    """The error names the tensor and both ranks."""
    rig.engine.max_loras, before = 1, num_arenas()
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(CONFIG.replace('"r": 2', '"r": 4'))
    with pytest.raises(InvalidFieldError, match=f"{A} has rank 2, the adapter's configuration has r = 4"):
        await rig.loras.load_directory("policy", str(tmp_path), 5.0)
    assert rig.engine.calls == []
    assert num_arenas() == before


async def test_an_adapter_that_comes_too_late_holds_no_memory(rig: Rig, tmp_path: Path) -> None:
    """Another update keeps the engine for longer than it may take: its files were made for nothing."""
    rig.engine.max_loras, before = 1, num_arenas()
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(CONFIG)
    async with rig.pauses.undisturbed(5.0):
        with pytest.raises(DeadlineError):
            await rig.loras.load_directory("policy", str(tmp_path), 0.05)
    assert rig.engine.calls == []
    assert num_arenas() == before


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
async def test_a_time_that_cannot_pass_is_refused(rig: Rig, tmp_path: Path, timeout_s: float) -> None:
    """By its name."""
    rig.engine.max_loras = 1
    with pytest.raises(InvalidFieldError) as caught:
        await rig.loras.load_directory("policy", str(tmp_path), timeout_s)
    assert caught.value.violations[0].field == "timeout"


def test_an_adapter_that_cannot_be_copied_holds_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has become shorter, or memory that is not there."""
    before = num_arenas()
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(CONFIG)

    def fail(*_: object) -> None:
        raise CheckpointFileError("it has become shorter")

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointFile, "read_into", fail)
        with pytest.raises(InvalidFieldError, match="has become shorter"):
            LoraFiles.of_directory(tmp_path, 8, None)
    assert num_arenas() == before
    tensors, data = space(TENSORS)
    staged = Arena.allocate(len(data))
    monkeypatch.setattr(Arena, "write", fail)
    with pytest.raises(CheckpointFileError):
        LoraFiles.of_push(LoraConfig.parse(CONFIG, 8, ""), tensors, staged, "p")
    staged.close()
    assert num_arenas() == before


def test_an_adapter_without_a_directory_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may be full: the bytes that it has taken over go as well."""
    before, taken = num_arenas(), Arena.allocate(8)

    def fail(**_: object) -> str:
        raise OSError("no space left on device")

    monkeypatch.setattr("genserve.weights.lora.files.tempfile.mkdtemp", fail)
    with pytest.raises(OSError, match="no space left"):
        LoraFiles(LoraConfig.parse(CONFIG, 8, ""), taken, "p")
    assert taken.closed
    assert num_arenas() == before


@pytest.mark.parametrize(("phase", "error"), [(Phase.DRAINING, DrainingError), (Phase.DEAD, EngineDeadError)])
async def test_adapters_neither_come_nor_go_where_nothing_changes(
    rig: Rig, tmp_path: Path, phase: Phase, error: type[GenserveError]
) -> None:
    """A daemon that ends, and an engine that has."""
    rig.engine.max_loras = 1
    enter_phase(rig.board, phase)
    with pytest.raises(error):
        await rig.loras.load_directory("policy", str(tmp_path), 5.0)
    with pytest.raises(error):
        rig.loras.unload("policy")
