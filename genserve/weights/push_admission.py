"""The checks before a push may send a byte, of its header, its tensors and the memory for its bytes: everything is
refused before anything is allocated or freed."""

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from genserve.errors import (
    FieldViolation,
    InvalidFieldError,
    ManifestMismatchError,
    StagingFullError,
    VersionNotNewerError,
    WeightVersionMismatchError,
)
from genserve.memory.available import require_memory
from genserve.tensors.manifest import MAX_UNNAMED_ISSUES, Manifest, PushIssue, structural_issues
from genserve.weights.checkpoint.index import MISSING, CheckpointIndex, checkpoint_issues
from genserve.weights.lora.config import LoraConfig, check_lora_name, largest_adapter_bytes, lora_issues
from genserve.weights.push.lifecycle import State
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.types import MAX_VERSION, LoraAdapter, PushAction, PushHeader
from genserve.weights.resident import ResidentStore
from genserve.wire.bounds import check_text

MAX_STREAMS = 1024
MAX_TENSORS = 1_000_000
MAX_PUSHES = 256
"""Of weights, and as many of adapters. Each holds a file descriptor, and may be too small for the limit of bytes to
matter."""
_MAX_TTL_S = 24 * 3600.0
_MAX_SHOWN_ISSUES = 3
_PARTIAL: Final = "; to keep the served values of what is missing, set partial (--partial)"
_MAX_NAMED = 3
_MARGIN_BYTES = 256 << 20
_BYTES_OF_UNKNOWN_MODEL = 64 << 30

log = logging.getLogger(__name__)


def check_header(header: PushHeader) -> None:
    """Raises InvalidFieldError for an invalid field, by its path in PushWeightsRequest."""
    for field in ("push_id", "attempt"):
        check_text(getattr(header, field), f"header.{field}")
    if header.lora is not None:
        _check_lora(header, header.lora)
    if header.lora is None or header.weight_version:
        check_version_number(header.weight_version, "header.weight_version")
    for field, ttl_s in (("staging_ttl", header.staging_ttl_s), ("prepared_ttl", header.prepared_ttl_s)):
        if not 0 < ttl_s <= _MAX_TTL_S:
            raise InvalidFieldError.of(
                f"header.{field}", f"must be above 0 s and at most {_MAX_TTL_S:g} s, is {ttl_s:g} s"
            )
    if not 1 <= header.num_streams <= MAX_STREAMS:
        raise InvalidFieldError.of("header.num_streams", f"must be in [1, {MAX_STREAMS}], is {header.num_streams}")
    for field in ("manifest_digest", "content_digest"):
        digest = getattr(header, field)
        if digest and (len(digest) != 64 or not set(digest) <= set("0123456789abcdef")):
            raise InvalidFieldError.of(f"header.{field}", "must be a SHA-256 in 64 lower-case hex digits")
    if header.manifest is None and not header.manifest_digest:
        raise InvalidFieldError.of("header.manifest", "is required, or manifest_digest on further streams")
    if header.manifest is None and not header.push_id:
        raise InvalidFieldError.of("header.push_id", "is required on further streams")


def _check_lora(header: PushHeader, lora: LoraAdapter) -> None:
    check_lora_name(lora.lora_name, "header.lora.lora_name")
    if header.manifest is not None and header.manifest.partial:
        raise InvalidFieldError.of("header.manifest.partial", "an adapter cannot be partial")
    if header.action is PushAction.PREPARE:
        raise InvalidFieldError.of("header.action", "an adapter is not prepared: nothing is exchanged for it")


def check_version_number(version: int, field: str) -> None:
    """Raises InvalidFieldError unless the number can be that of a version after the checkpoint's."""
    if not 1 <= version <= MAX_VERSION:
        raise InvalidFieldError.of(field, f"must be in [1, 2^32), is {version}")


def check_version(header: PushHeader, served_version: int) -> None:
    """Raises VersionNotNewerError or WeightVersionMismatchError if the version may not follow the served one, which of
    an adapter is that of the one loaded under its name, 0 if none is."""
    metadata = {"weight_version": str(served_version)}
    of_adapter = f" of adapter {header.lora_name!r}" if header.lora is not None else ""
    is_next = header.lora is not None and header.weight_version == 0
    if header.weight_version <= served_version and not (header.force or is_next):
        raise VersionNotNewerError(
            f"version {header.weight_version}{of_adapter} is not above the served version {served_version}: "
            "set force (--force) to take it nevertheless",
            metadata=metadata,
        )
    if header.expected_version is not None and header.expected_version != served_version:
        raise WeightVersionMismatchError(
            f"version {served_version}{of_adapter} is served, not {header.expected_version} as expected",
            metadata=metadata,
        )


def examine(
    manifest: Manifest | None,
    claimed_digest: str,
    checkpoint: CheckpointIndex | None,
    *,
    lora: LoraConfig | None = None,
) -> tuple[str, list[PushIssue]]:
    """Returns the digest of a manifest, of weights or of the adapter with this configuration, and its issues.

    The time is proportional to the checkpoint, not to the manifest: a manifest that is too large is refused unread.
    Raises as `check_num_tensors`, and InvalidFieldError if the digest is not the claimed one.
    """
    if manifest is None:
        return claimed_digest, []
    check_num_tensors(len(manifest.tensors), checkpoint, lora=lora is not None)
    issues = structural_issues(manifest)
    if issues:
        return "", issues
    if claimed_digest and claimed_digest != manifest.digest:
        raise InvalidFieldError.of("header.manifest_digest", f"the manifest's is {manifest.digest}")
    if lora is not None:
        return manifest.digest, lora_issues(manifest, checkpoint, lora)
    return manifest.digest, checkpoint_issues(manifest, checkpoint) if checkpoint is not None else []


def check_num_tensors(num_tensors: int, checkpoint: CheckpointIndex | None, *, lora: bool = False) -> None:
    """Raises ManifestMismatchError if a manifest of weights or of an adapter has too many tensors. Call it before
    converting a message, which would take seconds for a hostile one."""
    # An adapter has at most two tensors for each tensor of the checkpoint.
    limit = MAX_TENSORS if checkpoint is None else min(MAX_TENSORS, checkpoint.max_tensors * (2 if lora else 1))
    if num_tensors > limit:
        raise mismatch([PushIssue("", f"has {num_tensors} tensors; the limit is {limit}")])


def mismatch(issues: list[PushIssue]) -> ManifestMismatchError:
    """The error for a manifest with issues, of which it names tensors."""
    # The first of each kind: a name with a wrong prefix is unknown, and the name without it is missing.
    kinds = {issue.description: issue for issue in reversed(issues) if issue.tensor or issue is issues[0]}
    shown = list(reversed(kinds.values()))[:_MAX_SHOWN_ISSUES]
    about = "; ".join(f"{i.tensor[:256]!r} {i.description}" if i.tensor else f"it {i.description}" for i in shown)
    num_issues = sum(issue.num_issues for issue in issues)
    return ManifestMismatchError(
        f"the manifest does not match the checkpoint: {about}{_others(issues, num_issues - len(shown))}"
        f"{_PARTIAL if kinds.keys() == {MISSING} else ''}",
        violations=[FieldViolation(_field(issue.tensor), issue.description) for issue in issues],
        # Without it, the violations are all issues.
        metadata={"num_violations": str(num_issues)} if num_issues > len(issues) else None,
    )


def _others(issues: list[PushIssue], num_others: int) -> str:
    if not num_others:
        return ""
    at_least = "at least " if any(issue.num_issues == MAX_UNNAMED_ISSUES for issue in issues) else ""
    return f"; {at_least}{num_others} more, see the error's details"


def _field(tensor: str) -> str:
    return f'header.manifest.tensors["{tensor[:256]}"]' if tensor else "header.manifest"


def limit_bytes(configured_bytes: int, checkpoint: CheckpointIndex | None, max_lora_rank: int = 0) -> int:
    """The limit of a daemon; without a configured one (0) it holds the served version, the next one, and an adapter.
    `max_lora_rank`: 0 = the daemon takes none."""
    if configured_bytes > 0:
        return configured_bytes
    if checkpoint is None:
        return _BYTES_OF_UNKNOWN_MODEL
    # Packed matrices have other shapes than those that an adapter is for.
    adapter_bytes = min(largest_adapter_bytes(checkpoint, max_lora_rank), checkpoint.total_bytes)
    return 2 * checkpoint.total_bytes + adapter_bytes + _MARGIN_BYTES


@dataclass(frozen=True, slots=True)
class Evictions:
    """What must be freed for a push: bytes of other pushes, and versions that are pulled but not served any more, or
    all resident bytes."""

    leftovers: tuple[LivePush, ...] = ()
    releases_replaced: bool = False
    releases_resident: bool = False

    def clear(self, resident: ResidentStore) -> None:
        """Frees what is resident."""
        if self.releases_resident:
            log.warning("the resident weights give way to a larger push")
            resident.release_memory()
        elif self.releases_replaced:
            resident.release_replaced()  # pulls of a replaced version must start again


def naming_wide_tensors(
    error: StagingFullError, manifest: Manifest, checkpoint: CheckpointIndex | None
) -> StagingFullError:
    """The error, with how much wider the tensors of the push are than the checkpoint's, because its sender can cast
    them: if bytes are what it lacks."""
    if "max_pushes" in error.metadata:
        return error
    known = {} if checkpoint is None else checkpoint.tensors
    specs = [spec for spec in manifest.tensors if spec.name in known]
    pushed_bytes, usual_bytes = sum(spec.length for spec in specs), sum(known[spec.name].length for spec in specs)
    if pushed_bytes <= usual_bytes:
        return error
    times = f"{pushed_bytes / usual_bytes:.3g} times"
    return StagingFullError(
        f"{error.message}; the push's tensors are {times} as wide as the checkpoint's", metadata=error.metadata
    )


def plan_evictions(
    size_bytes: int,
    pushes: Collection[LivePush],
    max_bytes: int,
    resident: ResidentStore,
    *,
    partial: bool,
    lora: bool = False,
    replaces_weights: bool = False,
) -> Evictions:
    """Plans the memory for a push of `size_bytes` beside other `pushes` and the resident bytes.

    An idle push is freed unless it is staged or prepared, and was sent for that; for an adapter only if that needs its
    room. One that is preemptible then gives way to a push that is to replace the weights, and to no other: it may be
    about to be committed. Raises ApplyInProgressError for weights while other weights are in progress, and
    StagingFullError, which names the largest pushes, if nothing helps, or while MAX_PUSHES of its kind are here.
    """
    for push in pushes:
        if push.is_held and push.header.lora is None and not lora:
            raise push.in_progress()
    leftovers = tuple(push for push in pushes if _gives_way(push, replaces_weights))

    def planned(leftovers: tuple[LivePush, ...]) -> Evictions:
        return _planned(size_bytes, pushes, max_bytes, resident, leftovers, partial=partial, lora=lora)

    if lora:  # what has broken off may be resumed, and is in the way only if there is no room for both
        with suppress(StagingFullError):
            if (beside_all := planned(())) == Evictions():
                return beside_all
    return planned(leftovers)


def _planned(
    size_bytes: int,
    pushes: Collection[LivePush],
    max_bytes: int,
    resident: ResidentStore,
    leftovers: tuple[LivePush, ...],
    *,
    partial: bool,
    lora: bool,
) -> Evictions:
    """The plan in which these other pushes are freed."""
    staged = [push for push in pushes if push not in leftovers]
    alike = [push for push in staged if (push.header.lora is not None) is lora]
    if len(alike) >= MAX_PUSHES:
        why = f"there are {MAX_PUSHES} pushes of {'adapters' if lora else 'weights'}"
        raise _full(why, alike, {"max_pushes": str(MAX_PUSHES)})
    replaces_all = not (partial or lora)
    evicted = _plan(size_bytes, staged, max_bytes, resident, leftovers, replaces_all=replaces_all)
    freed_bytes = sum(push.staging.arena.size_bytes for push in leftovers)
    if evicted.releases_resident or not lora:  # an adapter leaves the arena that waits to the next version
        freed_bytes += resident.spare_bytes
    if evicted.releases_resident:
        freed_bytes += resident.held_bytes
    elif evicted.releases_replaced:
        freed_bytes += resident.held_bytes - resident.served_bytes
    # A push with all tensors uses the arena that waits as it is: no memory is allocated, so none is asked for, which
    # means reading files.
    if partial or lora or resident.spare_bytes != size_bytes:
        require_memory(size_bytes, freed_bytes)
    return evicted


def _gives_way(push: LivePush, replaces_weights: bool) -> bool:
    if push.is_held:
        return False
    waits = push.is_to_wait and push.lifecycle.state in (State.STAGED, State.PREPARED)
    return not waits or (replaces_weights and push.header.preemptible)


def _plan(
    size_bytes: int,
    staged: Sequence[LivePush],
    max_bytes: int,
    resident: ResidentStore,
    leftovers: tuple[LivePush, ...],
    *,
    replaces_all: bool,
) -> Evictions:
    staged_bytes = sum(push.size_bytes for push in staged)
    if staged_bytes + resident.held_bytes + size_bytes <= max_bytes:
        return Evictions(leftovers)
    if staged_bytes + resident.served_bytes + size_bytes <= max_bytes:
        return Evictions(leftovers, releases_replaced=True)
    # A push in a wider type than the checkpoint's is larger than the version that it replaces, and worth more.
    if replaces_all and not staged and size_bytes <= max_bytes:
        return Evictions(leftovers, releases_replaced=True, releases_resident=True)
    taken_bytes = staged_bytes + resident.held_bytes
    metadata = {"staged_bytes": str(taken_bytes), "max_staging_bytes": str(max_bytes)}
    why = f"{size_bytes} bytes do not fit: {taken_bytes} of the {max_bytes} bytes for pushes are in use"
    if not staged:
        why += "; give --max-staging-bytes more"
    raise _full(why, staged, metadata)


def _full(why: str, pushes: Sequence[LivePush], metadata: dict[str, str]) -> StagingFullError:
    """Names the largest of these pushes."""
    by_size = sorted(pushes, key=lambda push: push.size_bytes, reverse=True)
    push_ids, waiting = [push.push_id for push in by_size[:_MAX_NAMED]], ""
    if push_ids:
        metadata = metadata | {"push_ids": ",".join(push_ids)}
        others = f" and {len(pushes) - _MAX_NAMED} more" if len(pushes) > _MAX_NAMED else ""
        advice = "wait for, commit or discard" if any(push.is_held for push in pushes) else "commit or discard"
        waiting = f"; {advice} {', '.join(map(repr, push_ids))}{others}"
    return StagingFullError(f"{why}{waiting}", metadata=metadata)
