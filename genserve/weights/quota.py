"""Memory for the bytes of a push, within the daemon's limit. Everything is decided before anything is freed."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from genserve.errors import StagingFullError
from genserve.memory.available import require_memory
from genserve.tensors.manifest import Manifest
from genserve.weights.checkpoint.index import CheckpointIndex
from genserve.weights.push.lifecycle import State
from genserve.weights.push.live_push import LivePush
from genserve.weights.resident import ResidentStore

_MAX_NAMED = 3
_MARGIN_BYTES = 256 << 20
_BYTES_OF_UNKNOWN_MODEL = 64 << 30

log = logging.getLogger(__name__)


def limit_bytes(configured_bytes: int, checkpoint: CheckpointIndex | None) -> int:
    """The limit of a daemon; without a configured one (0) it holds the served version and the next one."""
    if configured_bytes > 0:
        return configured_bytes
    if checkpoint is None:
        return _BYTES_OF_UNKNOWN_MODEL
    return 2 * checkpoint.total_bytes + _MARGIN_BYTES


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
    them."""
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
    replaces_weights: bool = False,
) -> Evictions:
    """Plans the memory for a push of `size_bytes` beside other `pushes` and the resident bytes.

    An idle push is freed unless it is staged or prepared, and was sent for that. One that is preemptible then gives way
    to a push that is to replace the weights, and to no other: it may be about to be committed. Raises
    ApplyInProgressError while another push is in progress, and StagingFullError, which names pushes that have the
    memory, if nothing helps.
    """
    for push in pushes:
        if push.is_held:
            raise push.in_progress()
    leftovers = tuple(push for push in pushes if not _is_kept(push) or (replaces_weights and push.header.preemptible))
    staged = [push for push in pushes if push not in leftovers]
    evicted = _plan(size_bytes, staged, max_bytes, resident, leftovers, partial=partial)
    freed_bytes = sum(push.staging.arena.size_bytes for push in leftovers) + resident.spare_bytes
    if evicted.releases_resident:
        freed_bytes += resident.held_bytes
    elif evicted.releases_replaced:
        freed_bytes += resident.held_bytes - resident.served_bytes
    require_memory(size_bytes, freed_bytes)
    return evicted


def _is_kept(push: LivePush) -> bool:
    return push.is_to_wait and push.lifecycle.state in (State.STAGED, State.PREPARED)


def _plan(
    size_bytes: int,
    staged: Sequence[LivePush],
    max_bytes: int,
    resident: ResidentStore,
    leftovers: tuple[LivePush, ...],
    *,
    partial: bool,
) -> Evictions:
    staged_bytes = sum(push.size_bytes for push in staged)
    if staged_bytes + resident.held_bytes + size_bytes <= max_bytes:
        return Evictions(leftovers)
    if staged_bytes + resident.served_bytes + size_bytes <= max_bytes:
        return Evictions(leftovers, releases_replaced=True)
    # A push in a wider type than the checkpoint's is larger than the version that it replaces, and worth more.
    if staged_bytes == 0 and size_bytes <= max_bytes and not partial:
        return Evictions(leftovers, releases_replaced=True, releases_resident=True)
    taken_bytes = staged_bytes + resident.held_bytes
    metadata = {"staged_bytes": str(taken_bytes), "max_staging_bytes": str(max_bytes)}
    by_size = sorted(staged, key=lambda push: push.size_bytes, reverse=True)
    push_ids, waiting = [push.push_id for push in by_size[:_MAX_NAMED]], ""
    if push_ids:
        metadata["push_ids"] = ",".join(push_ids)
        others = f" and {len(staged) - _MAX_NAMED} more" if len(staged) > _MAX_NAMED else ""
        waiting = f"; commit or discard {', '.join(map(repr, push_ids))}{others}"
    raise StagingFullError(
        f"{size_bytes} bytes do not fit: {taken_bytes} of the {max_bytes} bytes for pushes are in use{waiting}",
        metadata=metadata,
    )
