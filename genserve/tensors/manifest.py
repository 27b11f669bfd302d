"""What a push contains: names, types, shapes and places in one flat byte space. Pure."""

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Self

from genserve.errors import FieldViolation, ManifestMismatchError
from genserve.tensors.dtypes import ITEM_BYTES, objection

MAX_NAMED_ISSUES = 20
MAX_UNNAMED_ISSUES = 980  # counted after those that are named, so that 1000 is the end
MAX_RANK = 16
_MAX_NAME_LENGTH = 1024
MAX_BYTES = 1 << 63


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name in the checkpoint, safetensors' name of its type, and its place in the byte space, in bytes.
    Row-major, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PushIssue:
    """An error in a push. `tensor` is empty if the error is not about one tensor. `num_issues` is the number of errors
    that it stands for, at least that many if it is MAX_UNNAMED_ISSUES."""

    tensor: str
    description: str
    num_issues: int = 1


@dataclass(frozen=True)
class Manifest:
    """All tensors of a push. `total_bytes` is the size of the byte space. `partial`: the checkpoint has more tensors,
    which keep their present values."""

    tensors: tuple[TensorSpec, ...]
    total_bytes: int
    partial: bool = False

    @classmethod
    def end_to_end(cls, tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> Self:
        """Tensors of these names, types, shapes and lengths in bytes, without gaps, in order of their names."""
        specs, end = [], 0
        for name, dtype, shape, length in sorted(tensors):
            specs.append(TensorSpec(name, dtype, shape, end, length))
            end += length
        return cls(tuple(specs), end)

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hex, of the tensors in order of their names; `PushHeader.manifest_digest` gives the format."""
        sha256 = hashlib.sha256()
        for t in sorted(self.tensors, key=lambda tensor: tensor.name):
            shape = ",".join(map(str, t.shape))
            sha256.update(f"{t.name}\t{t.dtype}\t{shape}\t{t.offset}\t{t.length}\n".encode())
        return sha256.hexdigest()


def completed(pushed: Manifest, base: Manifest, tied: Collection[str]) -> Manifest:
    """A partial manifest followed by the tensors of `base` that it lacks. Tensors in `tied` follow the tensor that they
    are tied to, so an older value is left out. Raises ManifestMismatchError for a tensor of `base` with an unknown
    type."""
    names = {spec.name for spec in pushed.tensors}
    tensors, end = list(pushed.tensors), pushed.total_bytes
    for spec in base.tensors:
        if spec.name not in names and spec.name not in tied:
            if spec.dtype not in ITEM_BYTES:
                raise ManifestMismatchError(
                    f"{spec.name!r}, which the push does not bring, cannot be loaded again: {objection(spec.dtype)}",
                    violations=[FieldViolation(f'header.manifest.tensors["{spec.name}"]', objection(spec.dtype))],
                )
            end += -end % ITEM_BYTES[spec.dtype]  # loaders prefer aligned elements
            tensors.append(replace(spec, offset=end))
            end += spec.length
    return Manifest(tuple(tensors), end)


def structural_issues(manifest: Manifest) -> list[PushIssue]:
    """The errors of a manifest by itself; `bounded` limits their number."""
    return bounded(_structural_issues(manifest))


def bounded(issues: Iterable[PushIssue]) -> list[PushIssue]:
    """The first issues, and one more with the number of the others. It stops at a thousand, so that a hostile manifest
    costs no more than an honest one."""
    source = iter(issues)
    named = list(islice(source, MAX_NAMED_ISSUES))
    num_more = sum(1 for _ in islice(source, MAX_UNNAMED_ISSUES))
    if num_more:
        at_least = "at least " if num_more == MAX_UNNAMED_ISSUES else ""
        named.append(PushIssue("", f"and {at_least}{num_more} more issues", num_more))
    return named


def _structural_issues(manifest: Manifest) -> Iterator[PushIssue]:
    if not 0 <= manifest.total_bytes < MAX_BYTES:
        yield PushIssue("", f"total_bytes {manifest.total_bytes} is out of range")
        return
    if not manifest.tensors:
        yield PushIssue("", "has no tensors")
        return
    names: set[str] = set()
    for spec in manifest.tensors:
        description = _name_issue(spec.name, names) or _size_issue(spec, manifest.total_bytes)
        if description:
            yield PushIssue(spec.name, description)
        names.add(spec.name)
    yield from _layout_issues(manifest.tensors, manifest.total_bytes)


def _name_issue(name: str, seen: set[str]) -> str:
    if not name:
        return "has no name"
    if name in seen:
        return "occurs more than once"
    if len(name) > _MAX_NAME_LENGTH or not name.isprintable():
        # The digest separates fields by tab and newline: a name that contains them could imitate another manifest.
        return f"name must be printable and at most {_MAX_NAME_LENGTH} characters long"
    return ""


def _size_issue(spec: TensorSpec, total_bytes: int) -> str:
    item_bytes = ITEM_BYTES.get(spec.dtype)
    if item_bytes is None:
        return objection(spec.dtype)
    if len(spec.shape) > MAX_RANK:
        return f"has {len(spec.shape)} dimensions, the limit is {MAX_RANK}"
    if any(not 0 <= size < MAX_BYTES for size in spec.shape):
        return f"shape {list(spec.shape)} is out of range"
    # Python's integers do not overflow: a product beyond 2**64 is exact, and differs from any length.
    size_bytes = math.prod(spec.shape) * item_bytes
    if spec.length != size_bytes:
        return f"length is {spec.length}, {spec.dtype} of shape {list(spec.shape)} takes {size_bytes} bytes"
    if spec.offset < 0 or spec.offset + spec.length > total_bytes:
        return f"bytes [{spec.offset}, {spec.offset + spec.length}) lie outside of total_bytes {total_bytes}"
    return ""


def _layout_issues(tensors: Sequence[TensorSpec], total_bytes: int) -> Iterator[PushIssue]:
    end, before = 0, ""
    for spec in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.length)):
        if spec.length <= 0:
            continue
        if spec.offset < end:
            yield PushIssue(spec.name, f"begins at {spec.offset}, inside {before!r}, which ends at {end}")
        elif spec.offset > end:
            yield PushIssue(spec.name, f"begins at {spec.offset}; bytes [{end}, {spec.offset}) belong to no tensor")
        if spec.offset + spec.length > end:
            end, before = spec.offset + spec.length, spec.name
    if end < total_bytes:
        yield PushIssue("", f"bytes [{end}, {total_bytes}) belong to no tensor")
