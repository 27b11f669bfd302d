"""One call to many replicas at once."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from genserve.errors import GenserveError
from genserve.fleet.upstream import Upstream

T = TypeVar("T")


def told_by(upstream: Upstream, error: GenserveError, more: str = "") -> GenserveError:
    """The error of a replica, which is named, for a client that has called all."""
    return type(error)(
        f"replica {upstream.address}: {error.message}{more}",
        violations=error.violations,
        retry_after_s=error.retry_after_s,
        metadata=error.metadata,
    )


async def everywhere(
    replicas: Iterable[Upstream], ask: Callable[[Upstream], Awaitable[T]]
) -> dict[Upstream, T | GenserveError]:
    """The answer of each replica, or its error."""

    async def answer(upstream: Upstream) -> T | GenserveError:
        try:
            return await ask(upstream)
        except GenserveError as error:
            return error.with_traceback(None)

    asked = list(replicas)
    return dict(zip(asked, await asyncio.gather(*map(answer, asked)), strict=True))
