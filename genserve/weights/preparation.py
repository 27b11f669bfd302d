"""A version that workers prepare beside the live one, and keep until it is used."""

import asyncio
import uuid

from genserve.engine.protocol import Engine
from genserve.engine.types import ArenaRef
from genserve.memory.arrival import Arrival
from genserve.weights.push.lifecycle import State
from genserve.weights.push.live_push import LivePush

_TIMEOUT_S = 24 * 3600.0  # what ends first is the push, by its time to live
_UNWANTED = frozenset({State.STAGED, State.FAILED, State.APPLIED, State.GONE})


class Preparation:
    """Begins when it is made. Either `finish` it and use what is prepared, or `end` it and discard that.

    Bytes that have arrived do not change, so nothing that is prepared from them is wrong later; whether all of them may
    be applied is checked when the last one is there, as for any push.
    """

    def __init__(self, engine: Engine, push: LivePush, timeout_s: float | None = None) -> None:
        """Without a `timeout_s` bytes still arrive: workers wait for them. Raises OSError then if the process has too
        many files open."""
        self.push = push
        self.nonce = uuid.uuid4().hex
        self._arrival = Arrival() if timeout_s is None else None
        if self._arrival is not None:
            push.staging.tell_arrival(self._arrival)
        weights, arrival_path = push.weights, "" if self._arrival is None else self._arrival.path
        where = ArenaRef(push.arena.path, weights.total_bytes, push.push_id, arrival_path)
        limit_s = _TIMEOUT_S if timeout_s is None else timeout_s
        preparing = engine.prepare_weights(self.nonce, where, weights.tensors, limit_s)
        self._task = asyncio.create_task(preparing, name=f"preparing push {push.push_id}")
        self._task.add_done_callback(self._close)

    @property
    def is_useless(self) -> bool:
        """Whether nobody will need it: the push is gone, or its present attempt has ended without all of its bytes, or
        it waits for a commit and is not prepared."""
        if self.push.lifecycle.state is State.RECEIVING:
            return self.push.attempt.result.done()
        return self.push.lifecycle.state in _UNWANTED

    async def finish(self, timeout_s: float) -> bool:
        """Waits until the version is prepared; False if it is not within `timeout_s`. Raises as
        `Engine.prepare_weights`."""
        # Without an arrival the engine has a time limit of its own, and its error says more.
        await asyncio.wait({self._task}, timeout=None if self._arrival is None else timeout_s)
        if not self._task.done():
            return False
        self._task.result()
        return True

    def end(self) -> None:
        """Stops waiting. What workers have prepared, or still prepare, is to be discarded: a push that is prepared is
        staged again."""
        self._task.cancel()
        self.push.unprepare()
        self.push.changed.tell()

    def _close(self, task: "asyncio.Task[None]") -> None:
        if self._arrival is not None:
            self.push.staging.tell_arrival(None)
            self._arrival.close()
        if not task.cancelled():
            task.exception()  # if nobody will `finish`, nobody else retrieves it
