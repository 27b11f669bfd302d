"""Calls that are late, and of which a server says why."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc.aio

from genserve.errors import DeadlineError


async def explained_errors(
    calls: Callable[[float], Awaitable[Sequence[Awaitable[object]]]], timeout_s: float
) -> list[Any]:
    """The errors of these calls with this timeout, to which a server adds why they are late. Calls once more with twice
    the time if a client gave up first: one side stood still."""
    errors = await asyncio.gather(*await calls(timeout_s), return_exceptions=True)
    if any(map(_is_unexplained, errors)):
        errors = await asyncio.gather(*await calls(2 * timeout_s), return_exceptions=True)
    return errors


def _is_unexplained(error: object) -> bool:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not error.trailing_metadata()
    return isinstance(error, DeadlineError) and not error.metadata
