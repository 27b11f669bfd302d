"""The pushes whose bytes are here, and the callers that are about to open one, by id. Owns the memory of pushes and
their time to live; `registry` decides who may open one."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from genserve.aio import Change
from genserve.errors import DrainingError, GenserveError, PushNotFoundError, StagingFullError
from genserve.weights.push.lifecycle import State
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.types import PushInFlight

MAX_LISTED: Final = 16


class LivePushes(dict[str, LivePush]):
    """Pushes by id. Frees the bytes of a push when it is dropped or idle for too long, and forgets it when it is
    applied. `clock` gives monotonic seconds. `changed` may be one that is notified of other changes, too."""

    def __init__(self, clock: Callable[[], float], changed: Change | None = None) -> None:
        super().__init__()
        self._clock = clock
        self.changed = Change() if changed is None else changed
        """Notified whenever one of them has changed."""
        self._opened = asyncio.Event()
        """Set when there may be one again."""
        self._gone_bytes = 0

    def find(self, push_id: str) -> LivePush:
        """A push. Raises PushNotFoundError."""
        if (push := self.get(push_id)) is None:
            raise not_found(push_id)
        return push

    def check_place(self, push_id: str) -> None:
        """Raises StagingFullError, naming it, if another push is prepared and does not give way: workers hold one at a
        time."""
        for push in self.values():
            if push.lifecycle.state is State.PREPARED and push.push_id != push_id and not push.header.preemptible:
                raise StagingFullError(
                    f"push {push.push_id!r} is prepared, and workers hold one version beside the live one: commit or "
                    "discard it first",
                    metadata={"push_id": push.push_id},
                )

    async def make_place(self, push_id: str) -> None:
        """Drops another push that is prepared: it gives way, see `check_place`."""
        prepared = [push for push in self.values() if push.lifecycle.state is State.PREPARED]
        await asyncio.gather(*(self.drop(push, push.truncation()) for push in prepared if push.push_id != push_id))

    def add(self, push: LivePush) -> None:
        """A push has been opened."""
        self[push.push_id] = push
        self._opened.set()
        self.changed.notify()

    def drop(self, push: LivePush, error: GenserveError) -> "asyncio.Future[None]":
        """Frees the bytes of a push, and gives its streams `error`. The future is done afterwards."""
        self.pop(push.push_id, None)
        push.drop(error)
        self.changed.notify()
        return self._free(push)

    def forget(self, push: LivePush) -> None:
        """It is applied: its bytes are freed, unless they are served."""
        del self[push.push_id]
        self._free(push)

    @property
    def received_bytes(self) -> int:
        """All bytes that were new when they arrived, also of pushes that are gone."""
        return self._gone_bytes + sum(push.staging.there.total for push in self.values())

    def in_flight(self) -> tuple[PushInFlight, ...]:
        """How far at most `MAX_LISTED` of them have come: those that are sent or carried out first, weights before
        adapters, then the newest."""

        def order(push: LivePush) -> tuple[bool, bool, float, str]:
            return not push.is_held, push.header.lora is not None, -push.attempt.began_at_s, push.push_id

        return tuple(map(_described, sorted(self.values(), key=order)[:MAX_LISTED]))

    def _free(self, push: LivePush) -> "asyncio.Future[None]":
        """Frees in a thread, because it would delay token streams."""
        self._gone_bytes += push.staging.there.total
        return asyncio.get_running_loop().run_in_executor(None, push.close)

    async def run(self) -> None:
        """Drops those whose time to live is over. Never returns."""
        while True:
            if not self:
                self._opened.clear()
                await self._opened.wait()
            idle = [push for push in self.values() if not push.lifecycle.is_busy]
            due_s = min((push.idle_until_s for push in idle), default=None)
            try:
                async with asyncio.timeout(None if due_s is None else max(0.0, due_s - self._clock())):
                    await self.changed.wait()
            except TimeoutError:
                for push in idle:
                    if not push.gone.is_set() and not push.lifecycle.is_busy and self._clock() >= push.idle_until_s:
                        self.drop(push, push.truncation())

    async def close(self) -> None:
        """Waits for those that are carried out, and drops all others."""
        while busy := [p.task for p in self.values() if p.lifecycle.is_busy and p.task is not None]:
            await asyncio.wait(busy)
        for push in list(self.values()):
            self.drop(push, DrainingError("the daemon is shutting down"))


@dataclass(eq=False, slots=True)
class Opening:
    """A caller that is about to open a push, or fetches one that is not open yet. `is_discarded`: nobody wants the push
    any more. `began_s`: when it began, on the clock of `perf_counter`."""

    push_id: str
    is_discarded: bool = False
    began_s: float = field(default_factory=time.perf_counter)

    def check(self) -> None:
        """Raises PushNotFoundError if the push was discarded meanwhile."""
        if self.is_discarded:
            raise PushNotFoundError(
                f"push {self.push_id!r} was discarded while it was opened", metadata={"push_id": self.push_id}
            )


class Openings:
    """The callers that are about to open pushes."""

    def __init__(self) -> None:
        self._openings: set[Opening] = set()

    @contextmanager
    def begun(self, push_id: str) -> Iterator[Opening]:
        """A caller is about to open this push, for the length of the block."""
        opening = Opening(push_id)
        self._openings.add(opening)
        try:
            yield opening
        finally:
            self._openings.remove(opening)

    def discard(self, push_id: str) -> None:
        """Nobody wants the push any more: each of its callers finds out."""
        for opening in self._openings:
            opening.is_discarded |= opening.push_id == push_id


def _described(push: LivePush) -> PushInFlight:
    """How far it has come. Cheap: the missing ranges, which may be many, are not read."""
    return PushInFlight(
        push_id=push.push_id,
        state=push.lifecycle.push_state,
        weight_version=push.header.weight_version,
        received_bytes=push.num_counted,
        total_bytes=push.staging.manifest.total_bytes,
        lora_name=push.header.lora_name,
        num_streams=push.num_attached,
        began_at_s=push.attempt.began_at_s,
        state_since_s=push.lifecycle.since_s,
    )


def not_found(push_id: str) -> PushNotFoundError:
    """The error for an id under which no bytes are here."""
    return PushNotFoundError(f"there is no push {push_id!r}; it may have timed out", metadata={"push_id": push_id})
