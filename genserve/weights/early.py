"""A version that workers prepare while its bytes are still arriving."""

import asyncio
import uuid
from typing import Any

from genserve.engine.protocol import Engine
from genserve.engine.types import ArenaRef
from genserve.memory.arrival import Arrival
from genserve.weights.push.live_push import LivePush

_TIMEOUT_S = 24 * 3600.0  # what ends first is the push, by its time to live


class EarlyPreparation:
    """Begins when it is made. Either `finish` it and use what is prepared, or `end` it and discard that.

    Bytes that have arrived do not change, so nothing that is prepared from them is wrong later; whether all of them may
    be applied is checked when the last one is there, as for any push.
    """

    def __init__(self, engine: Engine, push: LivePush) -> None:
        """Raises OSError if the process has too many files open."""
        self.push = push
        self.nonce = uuid.uuid4().hex
        self._arrival = Arrival()
        push.staging.tell_arrived(self._arrival.tell)
        weights = push.staging.manifest
        where = ArenaRef(push.arena.path, weights.total_bytes, push.push_id, self._arrival.path)
        preparing = engine.prepare_weights(self.nonce, where, weights.tensors, _TIMEOUT_S)
        self._task = asyncio.create_task(preparing, name=f"early preparation of push {push.push_id}")
        self._task.add_done_callback(self._close)

    @property
    def is_useless(self) -> bool:
        """Whether nobody will need it: the push is gone, or its present attempt has ended, or waits for a commit."""
        push = self.push
        return push.gone.is_set() or push.attempt.result.done() or push.lifecycle.can_commit

    async def wait_attempt(self) -> None:
        """Returns when the present attempt has ended, or the push is gone."""
        gone = asyncio.create_task(self.push.gone.wait())
        ends: list[asyncio.Future[Any]] = [gone, self.push.attempt.result]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()

    async def finish(self, timeout_s: float) -> bool:
        """Waits until the version is prepared; False if it is not within `timeout_s`. Raises as
        `Engine.prepare_weights`."""
        await asyncio.wait({self._task}, timeout=timeout_s)
        if not self._task.done():
            return False
        self._task.result()
        return True

    def end(self) -> None:
        """Stops waiting. What workers have prepared, or still prepare, is to be discarded."""
        self._task.cancel()

    def _close(self, task: "asyncio.Task[None]") -> None:
        self.push.staging.tell_arrived(None)
        self._arrival.close()
        if not task.cancelled():
            task.exception()  # if nobody will `finish`, nobody else retrieves it
