"""Which errors say that a replica is lost. Pure."""

from typing import Final

from genserve.errors import DeadlineError, DrainingError, EngineDeadError, GenserveError, UnavailableError

_GONE: Final = (UnavailableError, EngineDeadError)


def is_lost(error: GenserveError) -> bool:
    """Whether the replica is gone, or about to go: what was asked of it is to be asked elsewhere."""
    return isinstance(error, (DrainingError, *_GONE))


def may_have_done(error: GenserveError) -> bool:
    """Whether the replica may have done what it was asked, because it did not answer. One that is about to go has
    answered: with a refusal."""
    return isinstance(error, (DeadlineError, *_GONE))
