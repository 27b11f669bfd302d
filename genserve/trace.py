"""Which trace the running call belongs to, and the steps of work in it. Knows no tracer: `tracing` is one.

The headers are those of W3C Trace Context, as they come with a call and go on to the engine or to a replica. asyncio
keeps them for each task, and for the tasks that it starts.
"""

import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, ParamSpec, TypeVar

HEADERS: Final = ("traceparent", "tracestate")
_MAX_CHARS: Final = 512  # as much of tracestate as everybody has to pass on

P = ParamSpec("P")
T = TypeVar("T")
End = Callable[[BaseException | None], None]
"""Ends a step, with the error that ended it."""

_headers: ContextVar[Mapping[str, str] | None] = ContextVar("trace headers", default=None)
_begin: Callable[[str], End] | None = None


def keep_headers(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """The task of the caller belongs to the trace that these metadata name, if they name one."""
    found = {
        key: value
        for key, value in metadata
        if key in HEADERS and isinstance(value, str) and len(value) <= _MAX_CHARS and value.isascii()
    }
    _headers.set(found if "traceparent" in found else None)


def use_headers(headers: Mapping[str, str]) -> None:
    """The task of the caller belongs to this trace."""
    _headers.set(headers)


def headers() -> Mapping[str, str] | None:
    """What to send along; None if the running call belongs to no trace."""
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


def is_step(name: str) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Any]]:
    """Makes each call of a coroutine function a step."""

    def wrap(function: Callable[P, Awaitable[T]]) -> Callable[P, Any]:
        @functools.wraps(function)
        async def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with step(name):
                return await function(*args, **kwargs)

        return run

    return wrap
