"""One push while its bytes arrive: where they lie, which are there. Owns the arena until it is served."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping

from genserve.errors import (
    ChecksumMismatchError,
    ChunkOutOfRangeError,
    PushConflictError,
    PushTruncatedError,
    StagingFullError,
)
from genserve.weights.arena import Arena
from genserve.weights.checksum import crc32c_of
from genserve.weights.claims import Claim, Claims
from genserve.weights.manifest import Manifest, completed
from genserve.weights.push import PushHeader, PushIssue, PushReport, PushState
from genserve.weights.ranges import ByteRanges
from genserve.weights.resident import ResidentVersion

_MAX_RANGES = 65_536


class PushSession:
    """Staging of one push. `header` is that of the stream that joined last when nobody was sending; `clock` gives
    monotonic seconds. Use it from one thread."""

    def __init__(
        self,
        push_id: str,
        header: PushHeader,
        manifest: Manifest,
        digest: str,
        arena: Arena,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.push_id = push_id
        self.header = header
        self.manifest = manifest
        self.digest = digest
        self.arena = arena
        self.weights = manifest
        """What the arena holds: the manifest, and once a partial push is completed all tensors."""
        self.state = PushState.RECEIVING
        self.issues: tuple[PushIssue, ...] = ()
        self.verify_s = 0.0
        self.num_attached = 0
        self.is_served = False
        """Set when the version is live: the arena belongs to the resident store then."""
        self._clock = clock
        self._ranges = ByteRanges()
        self.claims = Claims()
        self._by_offset = sorted((t for t in manifest.tensors if t.length), key=lambda tensor: tensor.offset)
        self._offsets = [tensor.offset for tensor in self._by_offset]
        self._first_byte_s: float | None = None
        self._last_byte_s = 0.0
        self.last_activity_s = clock()

    def write(self, offset: int, data: bytes | memoryview, crc32c: int | None) -> None:
        """Stages a chunk. Bytes that are there already are compared, not written.

        Raises ChunkOutOfRangeError, ChecksumMismatchError, PushConflictError for other bytes than those that are there,
        and StagingFullError when the chunks leave tens of thousands of holes; none of them changes anything.
        """
        end = offset + len(data)
        self._check_range(offset, end)
        self.touch()
        if crc32c is not None:
            self._verify(offset, data, crc32c)
        if not data or self.is_served:
            return  # a repeat
        self._begin()
        new = self._ranges.gaps(offset, end)
        if new != [(offset, end)]:
            self._compare(offset, data, new)
        self._check_holes(len(new))
        chunk = memoryview(data)
        for start, stop in new:
            self.arena.write(start, chunk[start - offset : stop - offset])
        self._ranges.add(offset, end)
        self._last_byte_s = time.perf_counter()

    def claim(self, offset: int, length: int) -> Claim | None:
        """The right to write bytes that are not there; None when some of them are, or none are needed. Raises
        ChunkOutOfRangeError and StagingFullError as `write`, and ValueError for those that are claimed already."""
        end = offset + length
        self._check_range(offset, end)
        self.touch()
        if length == 0 or self.is_served or self._ranges.gaps(offset, end) != [(offset, end)]:
            return None
        self._check_holes(1)
        self._begin()
        return self.claims.add(offset, end, self.arena.target(offset, length))

    def settle(self, claim: Claim, *, written: bool) -> None:
        """The bytes of a claim are there, or will not come."""
        self.claims.settle(claim)
        self.touch()
        if written:
            self._ranges.add(claim.start, claim.end)
            self._last_byte_s = time.perf_counter()

    def _check_range(self, offset: int, end: int) -> None:
        if offset < 0 or end > self.manifest.total_bytes:
            raise ChunkOutOfRangeError(
                f"bytes [{offset}, {end}) lie outside of the {self.manifest.total_bytes} bytes of the manifest",
                metadata={"offset": str(offset), "total_bytes": str(self.manifest.total_bytes)},
            )

    def _check_holes(self, num_more: int) -> None:
        if self._ranges.num_ranges + num_more > _MAX_RANGES:
            raise StagingFullError(f"the chunks leave more than {_MAX_RANGES} holes; send them in order")

    def _begin(self) -> None:
        if self._first_byte_s is None:
            self._first_byte_s = time.perf_counter()

    def _verify(self, offset: int, data: bytes | memoryview, crc32c: int) -> None:
        began_s = time.perf_counter()
        computed = crc32c_of(data)
        self.verify_s += time.perf_counter() - began_s
        if computed != crc32c:
            name = self.tensor_at(offset)
            raise ChecksumMismatchError(
                f"the chunk of {len(data)} bytes at {offset} (in {name!r}) has CRC32C {computed:#010x}, "
                f"{crc32c:#010x} was sent with it",
                metadata={"offset": str(offset), "tensor": name},
            )

    def _compare(self, offset: int, data: bytes | memoryview, new: list[tuple[int, int]]) -> None:
        chunk = memoryview(data)
        starts = [offset, *(stop for _, stop in new)]
        stops = [*(start for start, _ in new), offset + len(data)]
        for start, stop in zip(starts, stops, strict=True):
            if not self.arena.equals(start, chunk[start - offset : stop - offset]):
                raise PushConflictError(
                    f"push {self.push_id!r} has other bytes already between {start} and {stop} "
                    f"(in {self.tensor_at(start)!r})",
                    metadata={"push_id": self.push_id, "offset": str(start)},
                )

    def touch(self) -> None:
        """Lets the time to live begin anew."""
        self.last_activity_s = self._clock()

    @property
    def is_complete(self) -> bool:
        """Whether every byte is there."""
        return self._ranges.total == self.manifest.total_bytes

    @property
    def missing_bytes(self) -> int:
        """How many bytes are not there."""
        return self.manifest.total_bytes - self._ranges.total

    def truncation(self) -> PushTruncatedError:
        """What a trainer is told that left bytes out."""
        return PushTruncatedError(
            f"push {self.push_id!r} lacks {self.missing_bytes} of {self.manifest.total_bytes} bytes",
            metadata={"push_id": self.push_id, "missing_bytes": str(self.missing_bytes)},
        )

    @property
    def receive_s(self) -> float:
        """Seconds from the first byte to the last."""
        return 0.0 if self._first_byte_s is None else self._last_byte_s - self._first_byte_s

    @property
    def idle_until_s(self) -> float:
        """When its time to live ends, on the clock."""
        return self.last_activity_s + self.header.staging_ttl_s

    def tensor_at(self, offset: int) -> str:
        """Name of the tensor that a byte belongs to, "" if to none."""
        index = bisect_right(self._offsets, offset) - 1
        if index < 0 or offset >= self._offsets[index] + self._by_offset[index].length:
            return ""
        return self._by_offset[index].name

    async def complete(self, base: ResidentVersion, tied: Mapping[str, str]) -> None:
        """Adds the tensors that a partial push lacks from the served version. Raises StagingFullError."""
        weights = completed(self.manifest, base.manifest, tied)

        def copy() -> None:
            self.arena.extend(weights.total_bytes)
            base.copy_into(self.arena, weights.tensors[len(self.manifest.tensors) :])

        await asyncio.to_thread(copy)
        self.weights = weights

    def tied_issues(self, tied: Mapping[str, str]) -> list[PushIssue]:
        """Tensors that are pushed beside the one that they are tied to, with other bytes: vLLM would ignore one of the
        two."""
        places = {spec.name: spec for spec in self.manifest.tensors}
        issues = []
        for name, other in tied.items():
            one, two = places.get(name), places.get(other)
            if one is None or two is None or (one.dtype, one.shape) != (two.dtype, two.shape):
                continue
            if not self.arena.equals(one.offset, self.arena.view(two.offset, two.length)):
                issues.append(PushIssue(name, f"differs from {other!r}, to which the checkpoint ties it"))
        return issues

    def report(self) -> PushReport:
        """How far it has come."""
        return PushReport(
            push_id=self.push_id,
            state=self.state,
            weight_version=self.header.weight_version,
            received_bytes=self._ranges.total,
            total_bytes=self.manifest.total_bytes,
            missing=tuple(self._ranges.missing(self.manifest.total_bytes)),
            issues=self.issues,
            manifest_digest=self.digest,
            lora_name=self.header.lora_name,
        )

    def close(self) -> None:
        """Frees the bytes, unless they are served. Safe to call more than once."""
        if not self.is_served:
            self.arena.close()
