"""Which trace the running call belongs to, and the steps of work in it. Knows no tracer: `tracing` is one.

The headers are those of W3C Trace Context, as they come with a call and go on to the engine or to a replica. asyncio
keeps them for each task, and for the tasks that it starts.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

TRACEPARENT: Final = "traceparent"
HEADERS: Final = (TRACEPARENT, "tracestate")
_MAX_CHARS: Final = 512  # as much of tracestate as everybody has to pass on
_KEY: Final = r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_MEMBER: Final = rf"{_KEY}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_FORMS: Final = {
    TRACEPARENT: re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"),
    "tracestate": re.compile(rf"{_MEMBER}([ \t]*,[ \t]*{_MEMBER}){{0,31}}[ \t]*"),
}
"""As the standard has them. OpenTelemetry would log each member of a list that has another form: lines for a caller."""

End = Callable[[BaseException | None], None]
"""Ends a step, with the error that ended it."""

_headers: ContextVar[Mapping[str, str] | None] = ContextVar("trace headers", default=None)
_begin: Callable[[str], End] | None = None


def keep_headers(metadata: Iterable[tuple[str, str | bytes]], *, unless_known: bool = False) -> None:
    """The task of the caller belongs to the trace that these metadata name, if they name one. `unless_known`: not if it
    belongs to one already."""
    if unless_known and _headers.get() is not None:
        return
    found = {
        key: value
        for key, value in metadata
        if key in HEADERS and isinstance(value, str) and len(value) <= _MAX_CHARS and _FORMS[key].fullmatch(value)
    }
    _headers.set(found if TRACEPARENT in found else None)


def use_headers(headers: Mapping[str, str]) -> None:
    """The task of the caller belongs to this trace."""
    _headers.set(headers)


def headers() -> Mapping[str, str] | None:
    """The metadata to send along; None if the running call belongs to no trace."""
    return _headers.get()


def trace_steps(begin: Callable[[str], End] | None) -> None:
    """From now on calls `begin` with the name of each step that begins; None = nothing."""
    global _begin
    _begin = begin


@contextmanager
def step(name: str) -> Iterator[None]:
    """A step of work, which may be traced."""
    if _begin is None:
        yield
        return
    end = _begin(name)
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        end(failure)
        del failure  # its traceback holds this frame
