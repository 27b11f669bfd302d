"""Version 0, the checkpoint that the engine loads: its files, opened when the daemon starts, and whether its bytes are
resident."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from genserve.engine.protocol import Engine
from genserve.tensors.safetensors import CheckpointFileError
from genserve.weights.checkpoint.files import CheckpointFiles
from genserve.weights.checkpoint.index import CheckpointIndex
from genserve.weights.checkpoint.space import CheckpointBytes, CheckpointSpace
from genserve.weights.resident import ResidentStore, ResidentVersion

_UNUSED_TIMEOUT_S: Final = 300.0
# vLLM's load formats under which the weights are those of the safetensors files. With "dummy" they are random.
_LOAD_SAFETENSORS = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"})


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A checkpoint's index, and its open files."""

    index: CheckpointIndex
    files: CheckpointFiles


def local_directory(model: str) -> Path | None:
    """The directory of the checkpoint's files if `model` is a path, and not the name of a repository."""
    path = Path(model)
    return path if path.is_dir() else None


def open_checkpoint(directory: Path, say: Callable[[str], None]) -> OpenedCheckpoint | None:
    """The checkpoint in a directory; `say` tells people why there is none. Call it before the engine reads its files,
    so that later changes are detected."""
    try:
        files = CheckpointFiles.open(directory)
        return OpenedCheckpoint(CheckpointIndex.read(files), files)
    except CheckpointFileError as error:
        say(f"{error}: the names of pushed tensors cannot be checked early")
        return None


def opened_as_loaded(
    opened: OpenedCheckpoint | None, directory: Path | None, loaded: Path | None, say: Callable[[str], None]
) -> OpenedCheckpoint | None:
    """The checkpoint that the engine has loaded from the directory `loaded`: `opened`, if that was of this `directory`.
    It is another one in the Hugging Face cache, where the files of a revision never change, and that of the verifier
    which the configuration of a speculator in `directory` names."""
    if directory is not None and directory == loaded:
        return opened
    if loaded is None:
        say("the checkpoint's files are not on this host: the names of pushed tensors cannot be checked early")
        return None
    return open_checkpoint(loaded, say)


async def loaded_index(opened: OpenedCheckpoint | None, engine: Engine) -> CheckpointIndex | None:
    """The index of a checkpoint, with what the engine has loaded of it: the measure of whether a push is complete. Call
    it before anything is served."""
    if opened is None:
        return None
    unused = await engine.weights.unused_tensors(opened.index.as_manifest().tensors, _UNUSED_TIMEOUT_S)
    return replace(opened.index, unused=unused)


def resident_store(
    opened: OpenedCheckpoint | None, load_format: str, say: Callable[[str], None], *, enabled: bool
) -> ResidentStore:
    """The store of a daemon that has started: it has version 0 if the engine is known to have loaded these bytes.
    `load_format` is vLLM's --load-format."""
    if opened is None:
        return ResidentStore(None, enabled=enabled)
    if load_format not in _LOAD_SAFETENSORS:
        absence = f"are unknown, because the engine did not load the checkpoint's files (--load-format {load_format})"
        return ResidentStore(None, enabled=enabled, absence=absence)
    try:
        opened.files.check_in_place()
    except CheckpointFileError as error:
        say(f"{error}: it is unknown what the engine loaded, so version 0 is not resident")
        absence = "are unknown, because the checkpoint's files changed while the daemon started"
        return ResidentStore(None, enabled=enabled, absence=absence)
    space = CheckpointSpace(opened.index, opened.files)
    first = ResidentVersion(0, space.manifest, CheckpointBytes(space), origin=opened.files.identity)
    return ResidentStore(first, enabled=enabled)
