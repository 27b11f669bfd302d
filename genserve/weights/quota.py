"""Room for the bytes of a push, within what the daemon may take. Everything is decided before anything is given up."""

import logging
from collections.abc import Collection
from dataclasses import dataclass

from genserve.errors import StagingFullError
from genserve.memory.available import require_memory
from genserve.weights.push.lifecycle import Stage
from genserve.weights.push.live_push import LivePush
from genserve.weights.resident import ResidentStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """What has to be given up for a push: leftovers of other pushes, and versions that are pulled but no longer served,
    or all that is resident."""

    leftovers: tuple[LivePush, ...] = ()
    gives_up_replaced: bool = False
    gives_up_resident: bool = False

    def clear(self, resident: ResidentStore) -> None:
        """Gives up what is resident."""
        if self.gives_up_resident:
            log.warning("the resident weights give way to a larger push")
            resident.give_up()
        elif self.gives_up_replaced:
            resident.give_up_replaced()  # whoever still pulls an old version has to begin again


def plan_room(
    size_bytes: int, pushes: Collection[LivePush], max_bytes: int, resident: ResidentStore, *, partial: bool
) -> Room:
    """What it takes for a push of `size_bytes` to fit beside other `pushes` and what is resident. A push that nobody is
    at gives way unless it is staged. Raises ApplyInProgressError while somebody is at one, and StagingFullError when
    nothing would do."""
    for push in pushes:
        if push.is_held:
            raise push.in_progress()
    leftovers = tuple(push for push in pushes if push.lifecycle.stage is not Stage.STAGED)
    staged_bytes = sum(push.size_bytes for push in pushes if push not in leftovers)
    room = _plan(size_bytes, staged_bytes, max_bytes, resident, leftovers, partial=partial)
    freed_bytes = sum(push.arena.size_bytes for push in leftovers) + resident.spare_bytes
    if room.gives_up_resident:
        freed_bytes += resident.held_bytes
    elif room.gives_up_replaced:
        freed_bytes += resident.held_bytes - resident.served_bytes
    require_memory(size_bytes, freed_bytes)
    return room


def _plan(
    size_bytes: int,
    staged_bytes: int,
    max_bytes: int,
    resident: ResidentStore,
    leftovers: tuple[LivePush, ...],
    *,
    partial: bool,
) -> Room:
    if staged_bytes + resident.held_bytes + size_bytes <= max_bytes:
        return Room(leftovers)
    if staged_bytes + resident.served_bytes + size_bytes <= max_bytes:
        return Room(leftovers, gives_up_replaced=True)
    # A push in a wider type than the checkpoint's is larger than what it replaces. It is worth more.
    if staged_bytes == 0 and size_bytes <= max_bytes and not partial:
        return Room(leftovers, gives_up_replaced=True, gives_up_resident=True)
    taken_bytes = staged_bytes + resident.held_bytes
    raise StagingFullError(
        f"{size_bytes} bytes are to be staged; {taken_bytes} of {max_bytes} are taken",
        metadata={"staged_bytes": str(taken_bytes), "max_staging_bytes": str(max_bytes)},
    )
