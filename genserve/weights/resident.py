"""The bytes of the served version, kept after it was applied.

Partial pushes are completed from them, PullWeights sends them to peers, and a commit that could not be undone is healed
with them. Before the first push they are the checkpoint's files, mapped; afterwards the arena that the push came in:
that one and the one that arrives next make two, which take turns. To have the kernel clear the pages of another one
takes 0.3 s a GB.
"""

import asyncio
import mmap
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol

from genserve.errors import NotResidentError, WeightVersionMismatchError
from genserve.weights.arena import Arena, allocate_arena
from genserve.weights.checkpoint import CheckpointIndex
from genserve.weights.manifest import Manifest, TensorSpec

_GAVE_WAY = "had to give way to a push"


class ByteSource(Protocol):
    """Where the bytes of a manifest's byte space lie. `held_bytes`: memory that is taken for them alone."""

    held_bytes: int

    def pieces(self, start: int, end: int) -> Iterator[memoryview]:
        """The bytes [start, end), in order, not copied. Raises ValueError once closed."""

    def close(self) -> None:
        """Gives the memory back. Safe to call more than once."""


class ArenaBytes:
    """The bytes of an arena."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.held_bytes = arena.size_bytes

    def pieces(self, start: int, end: int) -> Iterator[memoryview]:
        """The bytes [start, end), not copied."""
        yield self.arena.view(start, end - start)

    def close(self) -> None:
        """Gives the memory back."""
        self.arena.close()


class CheckpointBytes:
    """The files of a checkpoint, mapped, in the byte space of `CheckpointIndex.as_manifest`."""

    def __init__(self, checkpoint: CheckpointIndex) -> None:
        self.held_bytes = 0  # pages of files: the kernel takes them back as it likes
        specs = checkpoint.as_manifest().tensors
        self._tensors = [checkpoint.tensors[spec.name] for spec in specs]
        self._offsets = [spec.offset for spec in specs]
        self._files: dict[Path, memoryview] = {}

    def pieces(self, start: int, end: int) -> Iterator[memoryview]:
        """The bytes [start, end), tensor by tensor."""
        index = max(0, bisect_right(self._offsets, start) - 1)
        while start < end:
            tensor, offset = self._tensors[index], self._offsets[index]
            stop = min(end, offset + tensor.length)
            if start < stop:
                begin = tensor.position - offset
                yield self._file(tensor.path)[begin + start : begin + stop]
                start = stop
            index += 1

    def _file(self, path: Path) -> memoryview:
        if path not in self._files:
            with path.open("rb") as file:
                self._files[path] = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        return self._files[path]

    def close(self) -> None:
        """Lets go of the files; each is unmapped with the last piece of it."""
        self._files.clear()


class ResidentVersion:
    """A version whose bytes are here. `manifest` places all of its tensors."""

    def __init__(self, weight_version: int, manifest: Manifest, source: ByteSource) -> None:
        self.weight_version = weight_version
        self.manifest = manifest
        self.source = source
        self.num_readers = 0
        self._gone = False

    def pieces(self, start: int, end: int) -> list[memoryview]:
        """The bytes [start, end), in order, not copied. Raises WeightVersionMismatchError if their room was needed
        meanwhile."""
        try:
            if not self._gone:
                return list(self.source.pieces(start, end))
        except ValueError:
            pass  # closed meanwhile
        raise WeightVersionMismatchError(
            f"version {self.weight_version} was replaced, and its memory is needed: pull the present version",
            metadata={"weight_version": str(self.weight_version)},
        )

    def copy_into(self, arena: Arena, tensors: Iterable[TensorSpec]) -> None:
        """Copies tensors, found by name, to their places in `arena`. A memcpy of their bytes: call it in a thread."""
        places = {spec.name: spec for spec in self.manifest.tensors}
        for spec in tensors:
            source, position = places[spec.name], spec.offset
            for piece in self.pieces(source.offset, source.offset + source.length):
                arena.write(position, piece)
                position += len(piece)

    @asynccontextmanager
    async def as_arena(self) -> AsyncIterator[Arena]:
        """The bytes as an arena that workers can map: the one they lie in, or a copy for as long as the block lasts.
        Raises StagingFullError."""
        if isinstance(self.source, ArenaBytes):
            yield self.source.arena
            return
        arena = await allocate_arena(self.manifest.total_bytes)
        try:
            await asyncio.to_thread(self.copy_into, arena, self.manifest.tensors)
            yield arena
        finally:
            arena.close()

    def free(self) -> None:
        """Gives the memory back, whoever still reads: in a thread, as it takes long enough for streams to notice."""
        self._gone = True
        asyncio.get_running_loop().run_in_executor(None, self.source.close)


class ResidentStore:
    """The served version, and replaced ones for as long as somebody reads them. Use it on the event loop's thread."""

    def __init__(self, first: ResidentVersion | None, *, enabled: bool) -> None:
        """`first`: the checkpoint, if its files are here. Unless `enabled` nothing is ever kept."""
        self._enabled = enabled
        self._served = first if enabled else None
        self._absence = _GAVE_WAY if enabled else "are not kept (--no-resident-weights)"
        self._replaced: list[ResidentVersion] = []
        self._spare_arena: Arena | None = None

    async def room(self, size_bytes: int) -> Arena:
        """An arena for a push, which belongs to the caller: that of the version before the served one if it is as
        large. It still has the bytes of that version. Raises StagingFullError."""
        spare, self._spare_arena = self._spare_arena, None
        if spare is not None:
            if spare.size_bytes == size_bytes:
                return spare
            await asyncio.to_thread(spare.close)
        return await allocate_arena(size_bytes)

    @property
    def served(self) -> ResidentVersion | None:
        """The served version, if its bytes are here."""
        return self._served

    @property
    def held_bytes(self) -> int:
        """Memory that is taken."""
        kept = self._replaced if self._served is None else [self._served, *self._replaced]
        return sum(version.source.held_bytes for version in kept)

    def require(self) -> ResidentVersion:
        """The served version. Raises NotResidentError."""
        if self._served is None:
            raise NotResidentError(f"the bytes of the served version {self._absence}: push a complete version")
        return self._served

    def replace(self, version: ResidentVersion) -> None:
        """`version` is served from now on, and belongs to the store."""
        self._retire(version if self._enabled else None)
        if not self._enabled:
            version.free()

    def forget(self, absence: str) -> None:
        """Something else is served from now on, whose bytes are not here; errors say "the bytes ... {absence}"."""
        self._retire(None)
        if self._enabled:
            self._absence = absence

    def give_up_replaced(self) -> None:
        """Frees versions that are read but no longer served."""
        for version in self._replaced:
            version.free()
        self._replaced.clear()

    def give_up(self) -> None:
        """Frees everything."""
        self.forget(_GAVE_WAY)
        self.give_up_replaced()
        spare, self._spare_arena = self._spare_arena, None
        if spare is not None:
            asyncio.get_running_loop().run_in_executor(None, spare.close)

    @contextmanager
    def reading(self) -> Iterator[ResidentVersion]:
        """The served version, kept until the end of the block unless its room is needed. Raises NotResidentError."""
        version = self.require()
        version.num_readers += 1
        try:
            yield version
        finally:
            version.num_readers -= 1
            if version.num_readers == 0 and version in self._replaced:
                self._replaced.remove(version)
                version.free()

    def _retire(self, successor: ResidentVersion | None) -> None:
        before, self._served = self._served, successor
        if before is None:
            return
        if before.num_readers > 0:
            self._replaced.append(before)
        elif successor is None or not self._spare(before):
            before.free()

    def _spare(self, version: ResidentVersion) -> bool:
        """Whether the arena of a version nobody reads could be kept for the next push."""
        source = version.source
        # Who still had a view of it would see the next version's bytes.
        if self._spare_arena is not None or not isinstance(source, ArenaBytes) or source.arena.viewed:
            return False
        self._spare_arena = source.arena
        return True
