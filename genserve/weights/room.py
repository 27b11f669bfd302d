"""Room for the bytes of a push, within what the daemon may take."""

import logging

from genserve.errors import StagingFullError
from genserve.weights.resident import ResidentStore

log = logging.getLogger(__name__)


def make_room(size_bytes: int, staged_bytes: int, max_bytes: int, resident: ResidentStore, *, partial: bool) -> None:
    """Sees to it that a push of `size_bytes` fits beside `staged_bytes` of others and what is resident, of which some
    may have to go. Raises StagingFullError."""

    def fits() -> bool:
        return staged_bytes + resident.held_bytes + size_bytes <= max_bytes

    if not fits():
        resident.give_up_replaced()  # whoever still pulls an old version has to begin again
    if not fits() and staged_bytes == 0 and size_bytes <= max_bytes and not partial:
        # A push in a wider type than the checkpoint's is larger than what it replaces. It is worth more.
        log.warning("the resident weights give way to a push of %d bytes", size_bytes)
        resident.give_up()
    if not fits():
        taken_bytes = staged_bytes + resident.held_bytes
        raise StagingFullError(
            f"{size_bytes} bytes are to be staged; {taken_bytes} of {max_bytes} are taken",
            metadata={"staged_bytes": str(taken_bytes), "max_staging_bytes": str(max_bytes)},
        )
