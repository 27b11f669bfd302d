"""The checkpoint of a daemon that starts: opened if it can be read, resident if the engine loaded it."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from genserve.errors import NotResidentError
from genserve.weights.checkpoint.version_zero import local_directory, open_checkpoint, opened_as_loaded, resident_store
from tests.support.refusals import refuses


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of 16 bytes, which is not of this moment: kernels tell the time in steps of milliseconds."""
    save_file({"a": np.arange(4, dtype=np.float32)}, tmp_path / "model.safetensors")
    os.utime(tmp_path / "model.safetensors", (1, 1))
    return tmp_path


@pytest.fixture
def said() -> list[str]:
    """What people were told."""
    return []


def test_only_a_path_is_a_directory_of_this_host(directory: Path) -> None:
    """The name of a repository is none."""
    assert local_directory(str(directory)) == directory
    assert local_directory("org/model") is None


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
async def test_what_the_engine_loaded_is_resident(directory: Path, said: list[str], load_format: str) -> None:
    """As version 0, with the bytes of the files."""
    store = resident_store(open_checkpoint(directory, said.append), load_format, said.append, enabled=True)
    assert store.require().weight_version == 0
    assert bytes(store.require().view(0, 16)) == np.arange(4, dtype=np.float32).tobytes()
    assert said == []


async def test_version_0_of_other_files_is_of_another_origin(directory: Path, said: list[str]) -> None:
    """Whoever pulls it from a daemon that is started again goes on with bytes of the same files alone."""
    file, origins = directory / "model.safetensors", []
    for value in (1, 1, 2):
        if value == 2:
            save_file({"a": np.full(4, value, dtype=np.float32)}, file)
        store = resident_store(open_checkpoint(directory, said.append), "auto", said.append, enabled=True)
        origins.append(store.require().origin)
    assert origins[0] == origins[1] != origins[2] and origins[0]


async def test_random_weights_are_not_those_of_the_files(directory: Path, said: list[str]) -> None:
    """An engine with another load format served other bytes than a pull of version 0 would send."""
    store = resident_store(open_checkpoint(directory, said.append), "dummy", said.append, enabled=True)
    with refuses(NotResidentError, says="--load-format dummy"):
        store.require()


async def test_files_that_changed_during_the_start_are_not_resident(directory: Path, said: list[str]) -> None:
    """The engine may have read either; the index is still good for names and shapes."""
    opened = open_checkpoint(directory, said.append)
    (directory / "model.safetensors").touch()
    store = resident_store(opened, "auto", said.append, enabled=True)
    with pytest.raises(NotResidentError):
        store.require()
    assert len(said) == 1 and "model.safetensors: has changed" in said[0]


async def test_a_daemon_that_keeps_nothing_says_so(directory: Path, said: list[str]) -> None:
    """Though it knows the files."""
    store = resident_store(open_checkpoint(directory, said.append), "auto", said.append, enabled=False)
    with refuses(NotResidentError, says="--no-resident-weights"):
        store.require()


def test_a_checkpoint_that_cannot_be_read_is_told_and_left(tmp_path: Path, said: list[str]) -> None:
    """The daemon serves without one: names are checked when they are loaded."""
    assert open_checkpoint(tmp_path, said.append) is None
    assert opened_as_loaded(None, None, tmp_path, said.append) is None
    assert len(said) == 2 and all("no safetensors file found: the names" in line for line in said)


def test_the_files_are_those_that_the_engine_has_loaded(directory: Path, said: list[str], tmp_path: Path) -> None:
    """The configuration of a speculator names another model, and its own files are those of a draft."""
    opened = open_checkpoint(directory, said.append)
    assert opened_as_loaded(opened, directory, directory, said.append) is opened
    (verifier := tmp_path / "verifier").mkdir()
    save_file({"b": np.arange(4, dtype=np.float32)}, verifier / "model.safetensors")
    loaded = opened_as_loaded(opened, directory, verifier, said.append)
    assert loaded is not None and list(loaded.index.tensors) == ["b"]
    assert said == []


async def test_a_checkpoint_on_another_host_is_told_and_left(said: list[str]) -> None:
    """As one of an engine that reads it from a store of objects."""
    assert opened_as_loaded(None, None, None, said.append) is None
    assert len(said) == 1 and "not on this host" in said[0]
    with pytest.raises(NotResidentError):
        resident_store(None, "auto", said.append, enabled=True).require()
