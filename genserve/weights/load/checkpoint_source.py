"""A version that lies in safetensors files of the daemon's host."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from genserve.control.turn import uninterrupted
from genserve.errors import InvalidFieldError
from genserve.tensors.manifest import Manifest
from genserve.tensors.ranges import Range
from genserve.tensors.safetensors import CheckpointFileError
from genserve.weights.checkpoint.files import CheckpointFiles
from genserve.weights.checkpoint.index import CheckpointIndex
from genserve.weights.checkpoint.space import CheckpointSpace
from genserve.weights.load.types import Offer
from genserve.weights.push.staging import Claim
from genserve.weights.push.stream import PushStream

_FIELD = "checkpoint_path"
AT_ONCE_BYTES = 16 << 20
_COMPARED_AT_ONCE_BYTES = 1 << 20


class CheckpointSource:
    """The files at an absolute path. They are opened at each attempt."""

    def __init__(self, path: str) -> None:
        """Raises InvalidFieldError for a path that is not absolute."""
        self._path = Path(path)
        if not self._path.is_absolute() or "\0" in path:
            raise InvalidFieldError.of(_FIELD, "must be an absolute path on the daemon's host")

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    @asynccontextmanager
    async def open(self, missing: tuple[Range, ...] | None, weight_version: int) -> AsyncIterator[Offer]:
        """Opens the files and reads their headers. Raises InvalidFieldError for what is not a checkpoint, and for files
        that change."""
        try:
            space = await asyncio.to_thread(self._open)
            yield _Files(space, ((0, space.manifest.total_bytes),) if missing is None else missing)
        except CheckpointFileError as error:
            raise InvalidFieldError.of(_FIELD, f"{error} (on the daemon's host)") from error

    def _open(self) -> CheckpointSpace:
        try:
            files = CheckpointFiles.open(self._path) if self._path.is_dir() else CheckpointFiles([self._path])
            return CheckpointSpace(CheckpointIndex.read(files), files)
        except CheckpointFileError:
            raise
        except (OSError, ValueError) as error:  # a directory that may not be entered, a name that no file can have
            raise CheckpointFileError(f"{self._path}: {error}") from error


class _Files:
    """The offer of open files."""

    weight_version = 0
    origin = ""
    content_digest = ""

    def __init__(self, space: CheckpointSpace, missing: Sequence[Range]) -> None:
        self._space = space
        self._missing = missing

    @property
    def manifest(self) -> Manifest:
        """All of their tensors."""
        return self._space.manifest

    @property
    def identity(self) -> str:
        """Of the files, as long as nobody writes to them."""
        return self._space.files.identity

    async def send(self, stream: PushStream) -> None:
        """Reads into the memory of the push, in a thread. Raises CheckpointFileError, and as `PushStream.write`."""
        for start, end in self._missing:
            for position in range(start, end, AT_ONCE_BYTES):
                await self._send(stream, position, min(position + AT_ONCE_BYTES, end))

    async def _send(self, stream: PushStream, start: int, end: int) -> None:
        await stream.wait_unclaimed(start, end - start)
        claim = stream.claim(start, end - start)
        if claim is not None:
            await uninterrupted(self._fill(stream, claim))  # the thread writes there until it is done
            return
        data = memoryview(bytearray(end - start))
        await asyncio.to_thread(self._space.read_into, start, data)
        for position in range(0, len(data), _COMPARED_AT_ONCE_BYTES):
            stream.write(start + position, data[position : position + _COMPARED_AT_ONCE_BYTES], None)
            await asyncio.sleep(0)

    async def _fill(self, stream: PushStream, claim: Claim) -> None:
        written = False
        try:
            await asyncio.to_thread(self._space.read_into, claim.start, claim.target)
            written = True
        finally:
            stream.settle(claim, written=written)
