"""Which errors say that a replica is lost, and what is told of those that nobody foresaw."""

import logging
from typing import Final

from genserve.errors import DeadlineError, DrainingError, EngineDeadError, GenserveError, UnavailableError

log = logging.getLogger(__name__)

_GONE: Final = (UnavailableError, EngineDeadError)


def is_lost(error: GenserveError) -> bool:
    """Whether the replica is gone, or about to go: what was asked of it is to be asked elsewhere."""
    return isinstance(error, (DrainingError, *_GONE))


def told(error: Exception) -> GenserveError:
    """The error, or one for what nobody foresaw, which the log explains."""
    if isinstance(error, GenserveError):
        return error
    log.error("a request could not be passed on", exc_info=error)
    return GenserveError(f"the request could not be passed on: {type(error).__name__}: {error}")


def may_have_done(error: GenserveError) -> bool:
    """Whether the replica may have done what it was asked, because it did not answer. One that is about to go has
    answered: with a refusal."""
    return isinstance(error, (DeadlineError, *_GONE))
