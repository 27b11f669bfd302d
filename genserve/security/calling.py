"""Who makes the running call."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from genserve.security.access import Principal


@dataclass(frozen=True, slots=True)
class Calling:
    """Who calls, where callers are listed. `principal` is None for a call that needs no role, and has none."""

    principal: Principal | None


_calling: Final[ContextVar[Calling | None]] = ContextVar("calling", default=None)


def calling() -> Calling | None:
    """Who makes the running call; None where no callers are listed, so that everybody may do everything."""
    return _calling.get()


def tell_calling(principal: Principal | None) -> None:
    """Says who makes the running call, to its handler."""
    _calling.set(Calling(principal))
