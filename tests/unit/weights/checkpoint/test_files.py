"""Files that are read as they were found, or not at all."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from genserve.errors import NotResidentError, WeightVersionMismatchError
from genserve.tensors.manifest import Manifest, TensorSpec
from genserve.tensors.safetensors import CheckpointFileError
from genserve.weights.checkpoint.files import CheckpointFile, CheckpointFiles, FileChangedError
from genserve.weights.checkpoint.index import CheckpointIndex
from genserve.weights.checkpoint.space import CheckpointBytes, CheckpointSpace
from genserve.weights.resident import ResidentStore, ResidentVersion
from tests.unit.weights.conftest import Rig, header, send, weights

ONLY_B = Manifest((TensorSpec("b", "BF16", (8,), 0, 16),), 16, partial=True)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a checkpoint, which is not of this moment: kernels tell the time in steps of milliseconds."""
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    os.utime(tmp_path / "model.safetensors", (1, 1))
    return tmp_path / "model.safetensors"


def written_in_place(path: Path) -> None:
    """One byte, and as many as before."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")


def saved_anew(path: Path) -> None:
    """Emptied and written, as open(path, "wb") does."""
    path.write_bytes(path.read_bytes())


def cut_off(path: Path) -> None:
    """Shortened by a byte."""
    os.truncate(path, path.stat().st_size - 1)


def grown(path: Path) -> None:
    """A byte longer."""
    os.truncate(path, path.stat().st_size + 1)


def renamed_over(path: Path) -> None:
    """The same bytes in another file of this name."""
    path.with_name("new").write_bytes(path.read_bytes())
    path.with_name("new").rename(path)


def removed(path: Path) -> None:
    """Nothing there."""
    path.unlink()


def joined_by_another(path: Path) -> None:
    """An index says that there are two."""
    save_file({"b": np.zeros(4, np.float32)}, path.with_name("2.safetensors"))
    index = '{"weight_map": {"a": "model.safetensors", "b": "2.safetensors"}}'
    path.with_name("model.safetensors.index.json").write_text(index)


CHANGES = [written_in_place, saved_anew, cut_off, grown]
REPLACEMENTS = [renamed_over, removed, joined_by_another]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_was_written_to_is_not_read(file: Path, change: Callable[[Path], None]) -> None:
    """Whatever part of it: not even its header."""
    files = CheckpointFiles.open(file.parent)
    change(file)
    with pytest.raises(FileChangedError, match=r"model\.safetensors"):
        files.by_path[file].read(0, 8)
    with pytest.raises(CheckpointFileError):
        CheckpointIndex.read(files)
    with pytest.raises(FileChangedError):
        files.check_in_place()


@pytest.mark.parametrize("change", REPLACEMENTS)
def test_a_file_that_was_replaced_is_read_as_it_was(file: Path, change: Callable[[Path], None]) -> None:
    """It is held open. But who opens it by its path meanwhile may have found the other one."""
    files, before = CheckpointFiles.open(file.parent), file.read_bytes()
    files.check_in_place()
    change(file)
    files.check()
    assert files.by_path[file].read(0, len(before)) == before
    with pytest.raises(CheckpointFileError):
        files.check_in_place()


def test_descriptors_are_as_many_as_files_and_go_with_their_last_reader(file: Path) -> None:
    """One that is given up while a thread reads stays open as long: its number may be another file's afterwards."""

    def num_open() -> int:
        paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(path) == str(file) for path in paths)

    files = CheckpointFiles.open(file.parent)
    source = CheckpointBytes(CheckpointSpace(CheckpointIndex.read(files), files))
    reader = files.by_path[file]
    del files
    assert num_open() == 1
    source.close()
    with pytest.raises(ValueError, match="closed"):
        source.view(0, 1)
    assert len(reader.read(0, 8)) == 8
    del reader
    assert num_open() == 0


@pytest.mark.parametrize("path", ["/dev/null", "/etc"])
def test_only_files_are_opened(tmp_path: Path, path: str) -> None:
    """A directory or a device would do as it likes: nothing is read of it."""
    (tmp_path / "model.safetensors").symlink_to(path)
    with pytest.raises(CheckpointFileError):
        CheckpointFiles([tmp_path / "model.safetensors"])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """It may have been there when the index was written."""
    missing = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointFileError, match=re.escape(str(missing))):
        CheckpointFiles([missing])


NO_OBJECTS = {
    "empty": b"", "cut off": b"{", "no text": b"\xff", "deep": b"[" * 200_000, "list": b"[]",
    "null": b"null",
}  # fmt: skip


@pytest.mark.parametrize("content", NO_OBJECTS.values(), ids=NO_OBJECTS)
def test_a_config_that_is_no_json_object_is_named(file: Path, content: bytes) -> None:
    """Whatever is wrong with it. It says which tensors are tied, and a checkpoint may lack it."""
    files = CheckpointFiles.open(file.parent)
    names = CheckpointIndex.read(files).tensors.keys()
    path = file.parent / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointFileError, match=re.escape(str(path))):
        CheckpointIndex.read(files)
    path.write_text('{"a": 1}')
    assert CheckpointIndex.read(files).tensors.keys() == names


async def test_a_version_whose_files_were_written_to_is_not_resident(file: Path) -> None:
    """Who reads it already is told as well; the next version is as good as ever."""
    files = CheckpointFiles.open(file.parent)
    index = CheckpointIndex.read(files)
    store = ResidentStore(
        ResidentVersion(0, index.as_manifest(), CheckpointBytes(CheckpointSpace(index, files))), enabled=True
    )
    with store.reading() as read:
        assert read.view(0, 16) == bytes(16)
        written_in_place(file)
        with pytest.raises(NotResidentError):
            read.view(0, 1)
        assert store.served is None
        with pytest.raises(NotResidentError):
            store.require()
        store.release_replaced()
        with pytest.raises(WeightVersionMismatchError):
            read.view(0, 1)


@pytest.mark.parametrize("when", ["before it is opened", "before it is complete"])
async def test_a_partial_push_takes_no_byte_of_a_file_that_was_written_to(rig: Rig, tmp_path: Path, when: str) -> None:
    """It fails, the version before is served, and a complete push is welcome."""
    file, live = tmp_path / "weights", rig.engine.live
    if when == "before it is opened":
        saved_anew(file)
        with pytest.raises(NotResidentError):
            await rig.registry.open(header("partial", 1, manifest=ONLY_B))
    else:
        stream = await rig.registry.open(header("partial", 1, manifest=ONLY_B))
        file.write_bytes(weights(7))
        send(stream, weights(1)[16:])
        with pytest.raises(NotResidentError):
            await stream.finish()
        stream.detach()
    assert (rig.engine.calls, rig.engine.live) == ([], live)
    await rig.push(header("whole", 1))
    await rig.push(header("partial again", 2, manifest=ONLY_B), weights(2)[16:])


@pytest.mark.parametrize("num_at_once", [1, 5, 100])
def test_a_read_goes_on_where_the_kernel_has_stopped(
    file: Path, monkeypatch: pytest.MonkeyPatch, num_at_once: int
) -> None:
    """It gives at most 2 GiB at once, and fewer where it likes."""
    whole, read = file.read_bytes(), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, targets, place: read(fd, [targets[0][:num_at_once]], place))
    opened = CheckpointFile(file)
    assert opened.read(0, len(whole)) == whole
    assert opened.read(3, 20) == whole[3:23]
    with pytest.raises(CheckpointFileError):
        opened.read(len(whole) - 4, 6)


def fail(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_disk_that_fails_is_reported_with_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether bytes are read from it, or which files there are."""
    opened = CheckpointFile(file)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointFileError, match=f"^{re.escape(str(file))}: Input/output error$"):
            opened.read(0, 8)
    index = file.parent / "model.safetensors.index.json"
    index.write_text("{}")
    monkeypatch.setattr("genserve.weights.checkpoint.files.read_weight_map", fail)
    with pytest.raises(CheckpointFileError, match=f"^{re.escape(str(index))}: Input/output error$"):
        CheckpointFiles.open(file.parent)
