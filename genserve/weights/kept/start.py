"""Serves what was kept before a start, in the place of the checkpoint that the engine loads."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from genserve.engine.protocol import Engine
from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import EngineTaintedError, GenserveError
from genserve.tensors.manifest import Manifest, structural_issues
from genserve.tensors.safetensors import CheckpointFileError
from genserve.weights.apply import PushApplier
from genserve.weights.checkpoint.index import CheckpointIndex, checkpoint_issues
from genserve.weights.checkpoint.space import CheckpointBytes, CheckpointSpace
from genserve.weights.checkpoint.version_zero import OpenedCheckpoint
from genserve.weights.kept.checkpoint import digest_of, open_kept
from genserve.weights.kept.directory import KeptDirectory, KeptError, KeptVersion
from genserve.weights.kept.keeper import Keeper
from genserve.weights.resident import ResidentStore, ResidentVersion

_FLAG: Final = "--keep-committed"
_PAUSE_TIMEOUT_S: Final = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kept:
    """The directory of a daemon, and what its start is to serve, None = the checkpoint."""

    directory: KeptDirectory
    latest: KeptVersion | None


def find_kept(path: str, opened: OpenedCheckpoint | None, say: Callable[[str], None]) -> Kept | None:
    """The versions at `path`, "" = nothing is kept; `opened`: the checkpoint, if it is known before the engine starts,
    which takes long. `say` tells people what is served. Raises KeptError."""
    if not path:
        return None
    try:
        directory = KeptDirectory(Path(path))
    except OSError as error:
        raise KeptError(f"{_FLAG} {path}: {error}") from error
    latest = directory.latest
    if latest is None:
        say(f"{_FLAG} {path}: no version is kept there yet, the checkpoint is served")
        return Kept(directory, None)
    if opened is not None:
        # What the engine does not load of the checkpoint may be missing, and is not known yet.
        _check_belongs(latest, replace(_open(latest).manifest, partial=True), opened.index)
    record = latest.record
    say(f"{_FLAG}: version {record.weight_version} of {latest.path} is served, not the checkpoint")
    return Kept(directory, latest)


async def start_keeping(
    kept: Kept | None,
    opened: OpenedCheckpoint | None,
    index: CheckpointIndex | None,
    engine: Engine,
    resident: ResidentStore,
    applier: PushApplier,
) -> Keeper | None:
    """Serves what is kept, before anything else is served, and returns who keeps what follows it. `opened`: what the
    engine has loaded, with all that is known of it in `index`. Raises KeptError."""
    if kept is None:
        return None
    if opened is None or index is None or opened.files.directory is None:
        raise KeptError(f"{_FLAG} needs the files of --model on this host, for the configuration and the tokenizer")
    not_kept = {"adapters": engine.info.max_loras > 0, "vLLM's own weight transfer": bool(engine.info.weight_transfer)}
    for what in (what for what, is_used in not_kept.items() if is_used):
        log.warning("%s does not keep what comes by %s", _FLAG, what)
    if kept.latest is not None:
        version = await _verified(kept.latest, index)
        resident.replace(version)
        try:
            # Nothing of the checkpoint may be left in a cache.
            await engine.pause(PauseMode.KEEP, KvPolicy.RECOMPUTE, _PAUSE_TIMEOUT_S)
            await applier.restore(EngineTaintedError(f"version {version.weight_version} is to be served"))
            await engine.resume(_PAUSE_TIMEOUT_S)
        except GenserveError as error:
            raise _unusable(f"{kept.latest.path}: {error.message}", kept.latest) from error
    return Keeper(kept.directory, resident, opened.files.directory)


async def _verified(kept: KeptVersion, index: CheckpointIndex) -> ResidentVersion:
    """Every byte of it is read. Raises KeptError."""
    record = kept.record
    space = await asyncio.to_thread(_open, kept)
    _check_belongs(kept, space.manifest, index)
    try:
        found = await asyncio.to_thread(digest_of, space)
    except CheckpointFileError as error:
        raise _unusable(error, kept) from error
    if found != record.content_digest:
        raise _unusable(f"{kept.path}: its tensors have SHA-256 {found}, {record.content_digest} was written", kept)
    source, origin = CheckpointBytes(space), space.files.identity
    return ResidentVersion(record.weight_version, space.manifest, source, record.push_id, found, origin)


def _open(kept: KeptVersion) -> CheckpointSpace:
    try:
        return open_kept(kept.path)
    except CheckpointFileError as error:
        raise _unusable(error, kept) from error


def _check_belongs(kept: KeptVersion, manifest: Manifest, index: CheckpointIndex) -> None:
    """Raises KeptError for tensors that the checkpoint of --model does not have, or has in another shape."""
    issues = structural_issues(manifest) or checkpoint_issues(manifest, index)
    if issues:
        named = f"{issues[0].tensor!r} " if issues[0].tensor else "it "
        raise KeptError(
            f"{kept.path} does not belong to --model: {named}{issues[0].description}: pass the model that it was kept "
            f"of, or another {_FLAG}"
        )


def _unusable(error: object, kept: KeptVersion) -> KeptError:
    return KeptError(f"{error}: move {kept.path} away to serve without it")
