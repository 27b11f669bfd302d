"""What a push that failed has left on replicas, which would be in the way of the next one."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Final

from genserve.errors import ApplyInProgressError, GenserveError
from genserve.fleet.deadlines import ASK_S, DISCARD_S
from genserve.fleet.everywhere import everywhere
from genserve.fleet.upstream import Upstream
from genserve.v1 import weights_pb2

HAS_ALL: Final = (weights_pb2.PUSH_STATE_STAGED, weights_pb2.PUSH_STATE_PREPARED, weights_pb2.PUSH_STATE_APPLIED)
_DISCARD_EVERY_S: Final = 0.05


async def discard(push_id: str, replicas: Iterable[Upstream]) -> None:
    """Frees the bytes of a push on these replicas, as far as they answer."""
    await everywhere(replicas, lambda upstream: _discard_on(upstream, push_id))


async def discard_prepared(push_id: str, replicas: Iterable[Upstream]) -> None:
    """The same where nobody has begun to apply it."""

    async def discard_one(upstream: Upstream) -> None:
        if await _state(upstream, push_id) == weights_pb2.PUSH_STATE_PREPARED:
            await _discard_on(upstream, push_id)

    await everywhere(replicas, discard_one)


async def discard_refused(push_id: str, replicas: Sequence[Upstream]) -> None:
    """What the first replica does not have is not kept by the others; it may have refused one stream of many."""
    try:
        if await _state(replicas[0], push_id) in HAS_ALL:
            return
    except GenserveError:
        pass  # it does not know it, or is lost
    await discard(push_id, replicas[1:])


async def _state(upstream: Upstream, push_id: str) -> "weights_pb2.PushState.ValueType":
    request = weights_pb2.GetPushRequest(push_id=push_id)
    return (await upstream.ask(upstream.weights.GetPush, request, ASK_S)).push.state


async def _discard_on(upstream: Upstream, push_id: str) -> None:
    request = weights_pb2.DiscardPushRequest(push_id=push_id, force=True)
    until_s = time.monotonic() + DISCARD_S
    while True:
        try:
            await upstream.ask(upstream.weights.DiscardPush, request, DISCARD_S)
            return
        except ApplyInProgressError:
            # It is prepared there, and can be discarded when that is done.
            if time.monotonic() >= until_s:
                raise
            await asyncio.sleep(_DISCARD_EVERY_S)
