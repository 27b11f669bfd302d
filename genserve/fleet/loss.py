"""Which errors say that a replica is lost. Pure."""

from typing import Final

from genserve.errors import DeadlineError, DrainingError, EngineDeadError, GenserveError, UnavailableError

_GONE: Final = (UnavailableError, EngineDeadError)
_BROKEN_CODES: Final = ("CANCELLED", "INTERNAL", "UNKNOWN")
"""Of a status that no daemon has written: with these, too, gRPC ends the streams of a connection that breaks."""


def is_lost(error: GenserveError) -> bool:
    """Whether the replica is gone, or about to go: what was asked of it is to be asked elsewhere."""
    return isinstance(error, DrainingError) or _is_gone(error)


def may_have_done(error: GenserveError) -> bool:
    """Whether the replica may have done what it was asked, because it did not answer. One that is about to go has
    answered: with a refusal."""
    return isinstance(error, DeadlineError) or _is_gone(error)


def _is_gone(error: GenserveError) -> bool:
    if isinstance(error, _GONE):
        return True
    return "reason" not in error.metadata and error.metadata.get("code") in _BROKEN_CODES
