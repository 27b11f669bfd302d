"""What the running call is about, for the lines that are logged meanwhile: kept by asyncio for each task."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_MAX_CHARS: Final = 256
_FIELDS: Final[Mapping[str, ContextVar[str]]] = {
    name: ContextVar(name, default="") for name in ("method", "request_id", "push_id")
}


def note(*, method: str = "", request_id: str = "", push_id: str = "") -> None:
    """The task of the caller, and tasks that it starts, are about these from now on."""
    for name, value in (("method", method), ("request_id", request_id), ("push_id", push_id)):
        if value:
            _FIELDS[name].set(value)


@contextmanager
def about(request_id: str) -> Iterator[None]:
    """The block is about one request of several that its task serves."""
    token = _FIELDS["request_id"].set(request_id)
    try:
        yield
    finally:
        _FIELDS["request_id"].reset(token)


def noted() -> dict[str, str]:
    """What is known, shortened: ids come from clients."""
    known = {name: variable.get() for name, variable in _FIELDS.items()}
    return {name: value[:_MAX_CHARS] for name, value in known.items() if value}
