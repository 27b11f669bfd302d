"""The files of an adapter, which vLLM reads."""

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from genserve.errors import InvalidFieldError
from genserve.memory.arena import Arena
from genserve.process.leftovers import sweep
from genserve.tensors.safetensors import CheckpointFileError
from genserve.weights.checkpoint.files import CheckpointFile
from genserve.weights.lora.config import LoraConfig
from genserve.weights.lora.files import LoraFiles
from tests.support.refusals import refuses
from tests.unit.weights.conftest import num_arenas
from tests.unit.weights.lora.adapter import CONFIG, TENSORS, space


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


def test_daemons_that_start_at_once_do_not_hinder_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find the same files of one that was killed; the other one has removed the first of them meanwhile."""
    stale = [tmp_path / f"genserve-lora-4194305-{name}" for name in "xy"]
    for path in stale:
        path.mkdir()
    removed: list[None] = []
    real = Path.exists

    def exists(path: Path) -> bool:
        if path.name == "4194305" and not removed:
            removed.extend(each.rmdir() for each in stale)
        return real(path)

    monkeypatch.setattr(Path, "exists", exists)
    sweep(tmp_path)
    assert removed and not any(real(path) for path in stale)


def test_an_adapter_that_cannot_be_copied_holds_no_memory(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has become shorter, or memory that is not there."""
    before = num_arenas()

    def fail(*_: object) -> None:
        raise CheckpointFileError("it has become shorter")

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointFile, "read_into", fail)
        with refuses(InvalidFieldError, field="path"):
            LoraFiles.of_directory(saved, 8, None)
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


def test_daemons_that_start_at_the_same_time_sweep_the_same_directories(tmp_path: Path) -> None:
    """Each finds what another one is about to remove."""
    for number in range(400):
        (tmp_path / f"genserve-lora-{2**22 + number}-left").mkdir()
    errors: list[BaseException] = []

    def swept(start: threading.Barrier) -> None:
        start.wait()
        try:
            sweep(tmp_path)
        except BaseException as error:
            errors.append(error)

    start = threading.Barrier(4)
    threads = [threading.Thread(target=swept, args=(start,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(tmp_path.iterdir()) == []
