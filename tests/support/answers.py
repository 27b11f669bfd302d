"""Answers that a daemon gives before it has read everything."""

from collections.abc import Awaitable
from typing import Any

from genserve.transport.streams import FinalStatus


async def answer_of(call: Any, step: Awaitable[Any] | None = None) -> Any:
    """The result of a call that sends several messages, or of a `step` of it, such as its `read`. If the daemon refuses
    the call before it has read them all, this raises its error, where grpcio may raise that of a write."""
    return await FinalStatus(call).of(call if step is None else step)
