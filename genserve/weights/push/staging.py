"""The bytes of one push: their places, which have arrived, and which count. Owns the arena until its version is
served."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from genserve.aio import Change
from genserve.errors import ChecksumMismatchError, ChunkOutOfRangeError, PushConflictError, StagingFullError
from genserve.memory.arena import Arena, Arrival
from genserve.tensors.checksum import crc32c_of
from genserve.tensors.manifest import Manifest, PushIssue, TensorSpec, completed
from genserve.tensors.ranges import ByteRanges, Range
from genserve.weights.resident import ResidentVersion

MAX_RANGES = 65_536


def out_of_range(offset: int, end: int, total_bytes: int) -> ChunkOutOfRangeError:
    """The error for [offset, end) that does not lie in a byte space of `total_bytes`."""
    return ChunkOutOfRangeError(
        f"bytes [{offset}, {end}) lie outside of the {total_bytes} bytes of the manifest",
        metadata={"offset": str(offset), "total_bytes": str(total_bytes)},
    )


def check_chunk(
    offset: int, data: bytes | memoryview, crc32c: int | None, total_bytes: int, tensors: Sequence[TensorSpec] = ()
) -> None:
    """Checks that a chunk belongs to a push of `total_bytes` and arrived undamaged; the error names the one of
    `tensors` that it is for. Raises ChunkOutOfRangeError and ChecksumMismatchError."""
    end = offset + len(data)
    if offset < 0 or end > total_bytes:
        raise out_of_range(offset, end, total_bytes)
    if crc32c is None or (computed := crc32c_of(data)) == crc32c:
        return
    where, metadata = str(offset), {"offset": str(offset)}
    if tensors:
        metadata["tensor"] = _tensor_at(tensors, offset)
        where += f" (in {metadata['tensor']!r})"
    raise ChecksumMismatchError(
        f"the chunk of {len(data)} bytes at {where} has CRC32C {computed:#010x}, {crc32c:#010x} was sent with it",
        metadata=metadata,
    )


def _tensor_at(tensors: Sequence[TensorSpec], offset: int) -> str:
    """Name of the tensor that a byte belongs to, "" if to none. Looks at all: only errors need it."""
    return next((t.name for t in tensors if t.offset <= offset < t.offset + t.length), "")


def _too_many_holes() -> StagingFullError:
    return StagingFullError(f"the chunks leave more than {MAX_RANGES} holes; send them in order")


@dataclass(eq=False, slots=True)
class Claim:
    """The right of another thread or process to write [start, end) of an arena through `target`, which keeps the memory
    until it is settled. None of the bytes is there before."""

    start: int
    end: int
    target: memoryview
    counted: ByteRanges
    """Where they count: those of the attempt that claimed them."""


class Staging:
    """Takes chunks of one byte space, from one attempt after the other.

    A byte is written only once; the same byte sent again is compared. A byte counts when the present attempt has sent
    it, so bytes of an earlier attempt count only after they compared equal. Use it from one thread.
    """

    def __init__(self, push_id: str, manifest: Manifest, arena: Arena) -> None:
        self._push_id = push_id
        self.manifest = manifest
        self.arena = arena
        self.weights = manifest
        """The tensors in the arena: the manifest, and all tensors once a partial push is completed."""
        self.verify_s = 0.0
        """Seconds of checksums, of all streams together: those of shared memory are computed in threads."""
        self.claims: set[Claim] = set()
        """Places that others write to; they do not overlap."""
        self._settled = Change()
        self.there = ByteRanges()
        """The bytes that have arrived, whether they count or not."""
        self.counted = self.there
        """Those that count: all, until another attempt begins."""
        self._first_byte_s: float | None = None
        self._last_byte_s = 0.0
        self._arrival: Arrival | None = None

    def tell_arrival(self, arrival: Arrival | None) -> None:
        """From now on, reports to `arrival` the number of bytes that are there, from the first one on without a gap.
        These bytes do not change any more, whatever attempt has brought them."""
        self._arrival = arrival
        if arrival is not None:
            arrival.tell(self.there.prefix)

    def begin_anew(self) -> None:
        """Begins a new attempt: bytes that arrived before do not count until they are sent again."""
        self.counted = ByteRanges()
        self._first_byte_s, self.verify_s = None, 0.0

    def count_all(self) -> None:
        """Makes all bytes count, when every byte has arrived and was checked."""
        self.counted.add(0, self.manifest.total_bytes)

    def write(self, offset: int, data: bytes | memoryview, crc32c: int | None) -> int:
        """Stages a chunk and compares bytes that are there already. Returns how many more bytes count.

        Raises ChunkOutOfRangeError, ChecksumMismatchError, PushConflictError for bytes that differ from those there,
        and StagingFullError if the chunks leave tens of thousands of holes. These errors change nothing.
        """
        began_s = time.perf_counter()
        check_chunk(offset, data, crc32c, self.manifest.total_bytes, self.manifest.tensors)
        if crc32c is not None:
            self.verify_s += time.perf_counter() - began_s
        if not data:
            return 0
        if self._first_byte_s is None:
            self._first_byte_s = began_s
        end, there = offset + len(data), self.there
        # Most chunks come in order, behind all others.
        new = [(offset, end)] if offset >= there.end else there.gaps(offset, end)
        if new != [(offset, end)]:
            self.compare(offset, data, new)
        if max(there.num_ranges, self.counted.num_ranges) + len(new) > MAX_RANGES:
            raise _too_many_holes()
        chunk = memoryview(data)
        for start, stop in new:
            self.arena.write(start, chunk[start - offset : stop - offset])
        return self._add(offset, end, self.counted)

    def compare(self, offset: int, data: bytes | memoryview, new: Sequence[Range] = ()) -> None:
        """Compares a chunk with the bytes that are there, outside of what is `new`. Raises PushConflictError."""
        chunk = memoryview(data)
        starts = [offset, *(stop for _, stop in new)]
        stops = [*(start for start, _ in new), offset + len(data)]
        for start, stop in zip(starts, stops, strict=True):
            if not self.arena.equals(start, chunk[start - offset : stop - offset]):
                tensor = _tensor_at(self.manifest.tensors, start)
                raise PushConflictError(
                    f"push {self._push_id!r} already has other bytes between {start} and {stop} (in {tensor!r}): "
                    "two attempts or two callers sent different weights. Nothing was applied; push under another "
                    "push_id, or discard this push first",
                    metadata={"push_id": self._push_id, "offset": str(start)},
                )

    def claim(self, offset: int, length: int) -> Claim | None:
        """The right to write bytes that have not arrived; None if some have arrived, or none are needed. Raises
        ChunkOutOfRangeError and StagingFullError as `write`, and ValueError for bytes that are already claimed."""
        end = offset + length
        if offset < 0 or end > self.manifest.total_bytes:
            raise out_of_range(offset, end, self.manifest.total_bytes)
        if length == 0 or self.there.gaps(offset, end) != [(offset, end)]:
            return None
        if max(self.there.num_ranges, self.counted.num_ranges) + 1 > MAX_RANGES:
            raise _too_many_holes()
        if self._is_claimed(offset, end):
            raise ValueError(f"[{offset}, {end}) is claimed already")
        if self._first_byte_s is None:
            self._first_byte_s = time.perf_counter()
        claim = Claim(offset, end, self.arena.target(offset, length), self.counted)
        self.claims.add(claim)
        return claim

    def settle(self, claim: Claim, *, written: bool, verify_s: float = 0.0) -> int:
        """Ends a claim whose bytes were written, or will not be. They count if they are of the present attempt, and so
        do the seconds that their checksum took. Returns how many more bytes count."""
        self.claims.remove(claim)
        if claim.counted is self.counted:
            self.verify_s += verify_s
        claim.target.release()
        self._settled.notify()
        return self._add(claim.start, claim.end, claim.counted) if written else 0

    async def wait_unclaimed(self, offset: int, length: int) -> None:
        """Returns when nobody writes to any of these bytes. Use them at once: another claim may come."""
        while self._is_claimed(offset, offset + length):
            await self._settled.wait()

    def _is_claimed(self, start: int, end: int) -> bool:
        return any(claim.start < end and start < claim.end for claim in self.claims)

    def _add(self, start: int, end: int, counted: ByteRanges) -> int:
        there = self.there
        before, new = there.prefix, there.add(start, end)
        if self._arrival is not None and there.prefix > before:
            self._arrival.tell(there.prefix)
        if counted is not self.counted:
            return 0  # of an attempt that another one has followed
        self._last_byte_s = time.perf_counter()
        return new if counted is there else counted.add(start, end)

    @property
    def has_every_byte(self) -> bool:
        """Whether every byte counts."""
        return self.counted.total == self.manifest.total_bytes

    @property
    def missing(self) -> tuple[tuple[int, int], ...]:
        """The ranges of bytes that do not count, in order."""
        return tuple(self.counted.missing(self.manifest.total_bytes))

    @property
    def receive_s(self) -> float:
        """Seconds from the first byte of the attempt to the last."""
        return 0.0 if self._first_byte_s is None else max(0.0, self._last_byte_s - self._first_byte_s)

    async def complete(self, base: ResidentVersion, tied: Mapping[str, str]) -> None:
        """Adds the tensors that a partial push lacks from the served version, which may be another one than the last
        time. Raises StagingFullError."""
        weights = completed(self.manifest, base.manifest, tied)
        self.weights = self.manifest  # nobody reads what is written over

        def copy() -> None:
            self.arena.extend(weights.total_bytes)
            base.copy_into(self.arena, weights.tensors[len(self.manifest.tensors) :])

        await asyncio.to_thread(copy)
        self.weights = weights

    def tied_issues(self, tied: Mapping[str, str]) -> list[PushIssue]:
        """Tensors that are pushed together with the tensor that they are tied to, but with other bytes: vLLM would
        ignore one of the two."""
        places = {spec.name: spec for spec in self.manifest.tensors}
        issues = []
        for name, other in tied.items():
            one, two = places.get(name), places.get(other)
            if one is None or two is None or (one.dtype, one.shape) != (two.dtype, two.shape):
                continue
            if not self.arena.equals(one.offset, self.arena.view(two.offset, two.length)):
                issues.append(PushIssue(name, f"differs from {other!r}, to which the checkpoint ties it"))
        return issues

    def close(self) -> None:
        """Frees the bytes. Safe to call more than once."""
        self.arena.close()
