"""The bytes of the served version, kept after it was applied.

They complete partial pushes, PullWeights sends them to peers, and the daemon restores a version from them if a commit
could not be undone. Before the first push they are the checkpoint's files, as long as these do not change. Afterwards
they are the arena of the push. This arena and the one of the next push alternate, because the kernel needs 0.3 s per GB
to clear the pages of another one.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from genserve.aio import Change
from genserve.errors import NotResidentError, StagingFullError, WeightVersionMismatchError
from genserve.memory.arena import Arena, allocate_arena
from genserve.memory.available import available_memory_bytes
from genserve.tensors.manifest import Manifest, TensorSpec

CHANGED = "are unknown, because the checkpoint's files have changed since the daemon started"

log = logging.getLogger(__name__)

_PLENTY = 4  # times the size of an arena: the served version, the next one, and as much for everybody else
_GAVE_WAY = "were freed for a larger push"


class ByteSource(Protocol):
    """The source of the bytes of a manifest's byte space. `held_bytes`: memory that is used only for them. Readers
    raise ValueError once it is closed, and NotResidentError if the bytes are not those of the version any more."""

    held_bytes: int

    def check(self) -> None:
        """Raises NotResidentError as a read would."""

    def view(self, start: int, end: int) -> memoryview:
        """The bytes [start, end), without a copy if they are in memory."""

    def read_into(self, start: int, target: memoryview) -> None:
        """Copies the bytes from `start` on, until `target` is full."""

    def close(self) -> None:
        """Frees the memory. Safe to call more than once."""


class ArenaBytes:
    """The bytes of an arena."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.held_bytes = arena.size_bytes

    def check(self) -> None:
        """Does nothing: nobody else writes there."""

    def view(self, start: int, end: int) -> memoryview:
        """The bytes [start, end), not copied."""
        return self.arena.view(start, end - start)

    def read_into(self, start: int, target: memoryview) -> None:
        """A memcpy; releases the GIL."""
        if target:
            import numpy as np  # a router imports this module and has no numpy

            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(self.view(start, start + len(target)), np.uint8))

    def close(self) -> None:
        """Frees the memory."""
        self.arena.close()


@dataclass(eq=False)
class ResidentVersion:
    """A version with bytes in the daemon. `manifest` places all of its tensors. `push_id`: of the push that brought it,
    "" if none did. `origin`: that of the push, or the identity of the files. It is the same for the same bytes alone,
    because a pull that broke goes on by it. `content_digest`: of these tensors, "" if nobody has computed it."""

    lora = None  # these are weights

    weight_version: int
    manifest: Manifest
    source: ByteSource
    push_id: str = ""
    content_digest: str = ""
    origin: str = ""
    num_readers: int = field(default=0, init=False)
    _gone: bool = field(default=False, init=False)

    @property
    def size_bytes(self) -> int:
        """Size of its byte space."""
        return self.manifest.total_bytes

    def there(self, start: int, end: int) -> tuple[int, int] | None:
        """All of the bytes are there."""
        return start, end

    async def wait(self) -> None:
        """Nothing is waited for: it is complete."""

    async def wait_complete(self) -> None:
        """Returns at once."""

    def view(self, start: int, end: int) -> memoryview:
        """The bytes [start, end), without a copy if they are in memory. Raises WeightVersionMismatchError if their
        memory was needed meanwhile, and NotResidentError."""
        with self._while_here():
            return self.source.view(start, end)

    def window(self, start: int, end: int) -> memoryview:
        """As `view`, for a thread that reads one part after the other."""
        with self._while_here():
            if isinstance(self.source, ArenaBytes):
                return self.source.arena.window(start, end - start)
            return self.source.view(start, end)

    def copy_into(self, arena: Arena, tensors: Iterable[TensorSpec]) -> None:
        """Copies tensors, found by name, to their places in `arena`. Call it in a thread. Raises as `view`."""
        places = {spec.name: spec for spec in self.manifest.tensors}
        for spec in tensors:
            target = arena.target(spec.offset, spec.length)
            with self._while_here():
                self.source.read_into(places[spec.name].offset, target)

    @contextmanager
    def _while_here(self) -> Iterator[None]:
        try:
            self._check_here()
            yield
            self._check_here()  # closed meanwhile, its descriptor may be that of other memory
        except ValueError as closed:
            raise WeightVersionMismatchError(
                f"version {self.weight_version} was replaced, and its memory is in use: pull the served version",
                metadata={"weight_version": str(self.weight_version)},
            ) from closed

    def _check_here(self) -> None:
        if self._gone:
            raise ValueError("closed")

    @asynccontextmanager
    async def as_arena(self) -> AsyncIterator[Arena]:
        """The bytes as an arena that workers can map: their own arena, or a copy for the length of the block. Raises
        StagingFullError."""
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
        """Frees the memory even if somebody reads it. Call it in a thread, because it would delay streams."""
        self._gone = True
        asyncio.get_running_loop().run_in_executor(None, self.source.close)


class ResidentStore:
    """The served version, and replaced ones as long as somebody reads them. Use it on the event loop's thread."""

    def __init__(self, first: ResidentVersion | None, *, enabled: bool, absence: str = "are not on this host") -> None:
        """`first`: the checkpoint, if its files are available; otherwise errors say "the bytes ... {absence}". With
        `enabled` False nothing is kept."""
        self._enabled = enabled
        self._served = first if enabled else None
        self._absence = absence if enabled else "are not kept (--no-resident-weights)"
        self.push_id = ""
        """The push that brought the served version, also if its bytes are not kept; "" if none did."""
        self.content_digest = ""
        """Digest of the contents of the served version; "" if it is not known."""
        self._replaced: list[ResidentVersion] = []
        self._spare_arena: Arena | None = None
        self._reserving: asyncio.Task[None] | None = None
        self.replacement = Change()
        """Notified when another version is served."""

    async def keep_reserved(self, size_bytes: int, room_bytes: Callable[[], int]) -> None:
        """Has an arena ready for the next push, of this size at first and then of the last push's, while the machine
        has plenty of memory and the limit of the daemon leaves `room_bytes` for it. From the second push on the arena
        of the previous version is; until then the kernel would have to clear another one while a trainer waits. Never
        returns."""
        while True:
            is_needed = self._enabled and self._spare_arena is None
            if self.served_bytes > 0:  # a trainer may push a wider type than the checkpoint's
                size_bytes = self.served_bytes
            if is_needed and size_bytes <= room_bytes() and _is_plenty(size_bytes):
                self._reserving = asyncio.create_task(self._reserve(size_bytes), name="reserving an arena")
                await asyncio.wait({self._reserving})
                self._reserving = None
            await self.replacement.wait()

    async def _reserve(self, size_bytes: int) -> None:
        try:
            arena = await allocate_arena(size_bytes)
        except StagingFullError as error:
            log.info("no memory is reserved for the next push: %s", error)
            return
        if self._spare_arena is None:
            self._spare_arena = arena
        else:
            await asyncio.to_thread(arena.close)

    async def arena_for(self, size_bytes: int) -> Arena:
        """An arena for a push, owned by the caller: that of the previous version if it has the same size, with its
        old bytes. Raises StagingFullError."""
        if self._reserving is not None:
            await asyncio.wait({self._reserving})  # sooner done than another one would be
        spare, self._spare_arena = self._spare_arena, None
        if spare is not None:
            if spare.size_bytes == size_bytes:
                return spare
            await asyncio.to_thread(spare.close)
        return await allocate_arena(size_bytes)

    @property
    def served(self) -> ResidentVersion | None:
        """The served version, if its bytes are available."""
        if self._served is not None:
            try:
                self._served.source.check()
            except NotResidentError:
                self._lose(CHANGED)
        return self._served

    def serves(self, arena: Arena) -> bool:
        """Whether the bytes of the served version are in this arena. Any thread may ask."""
        served = self._served
        return served is not None and isinstance(served.source, ArenaBytes) and served.source.arena is arena

    @property
    def held_bytes(self) -> int:
        """Memory in use."""
        kept = self._replaced if self._served is None else [self._served, *self._replaced]
        return sum(version.source.held_bytes for version in kept)

    @property
    def served_bytes(self) -> int:
        """Memory of the served version."""
        return 0 if self._served is None else self._served.source.held_bytes

    @property
    def spare_bytes(self) -> int:
        """Memory of the arena that waits for the next push."""
        return 0 if self._spare_arena is None else self._spare_arena.size_bytes

    def require(self) -> ResidentVersion:
        """The served version. Raises NotResidentError."""
        version = self.served
        if version is None:
            raise NotResidentError(f"the bytes of the served version {self._absence}: push a complete version")
        return version

    def replace(self, version: ResidentVersion) -> None:
        """`version` is served from now on, and belongs to the store."""
        self._retire(version if self._enabled else None)
        self.push_id, self.content_digest = version.push_id, version.content_digest
        if not self._enabled:
            version.free()
        self.replacement.notify()

    def forget(self, absence: str) -> None:
        """Records that other weights are served, whose bytes are not available; errors say "the bytes ...
        {absence}"."""
        self._lose(absence)
        self.push_id, self.content_digest = "", ""
        self.replacement.notify()

    def _lose(self, absence: str) -> None:
        """The bytes of the served version are not available any more."""
        self._retire(None)
        if self._enabled:
            self._absence = absence

    def release_replaced(self) -> None:
        """Frees versions that are read but not served any more."""
        for version in self._replaced:
            version.free()
        self._replaced.clear()

    def release_memory(self) -> None:
        """Frees everything."""
        self._lose(_GAVE_WAY)
        self.release_replaced()
        spare, self._spare_arena = self._spare_arena, None
        if spare is not None:
            asyncio.get_running_loop().run_in_executor(None, spare.close)

    @contextmanager
    def reading(self) -> Iterator[ResidentVersion]:
        """The served version, kept until the end of the block unless its memory is needed. Raises NotResidentError."""
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
        """Whether the arena of a version that nobody reads could be kept for the next push."""
        source = version.source
        # A remaining view of it would see the bytes of the next version.
        if self._spare_arena is not None or not isinstance(source, ArenaBytes) or source.arena.viewed:
            return False
        self._spare_arena = source.arena
        return True


def _is_plenty(size_bytes: int) -> bool:
    try:
        return available_memory_bytes() > _PLENTY * size_bytes
    except OSError:  # the kernel does not report it
        return False
