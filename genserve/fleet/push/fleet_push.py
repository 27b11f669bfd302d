"""One push for all replicas."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, Final, TypeVar

from genserve.errors import ApplyInProgressError, DeadlineError, FleetPushError, GenserveError, PushTruncatedError
from genserve.fleet.everywhere import everywhere
from genserve.fleet.fleet import Fleet
from genserve.fleet.push.commit import commit_everywhere
from genserve.fleet.push.header import applies, request_of
from genserve.fleet.push.spread import Spread, relay
from genserve.fleet.upstream import ASK_S, DISCARD_S, FETCH_S, Upstream, apply_s, prepared_ttl_s
from genserve.forward.upstream import may_have_done
from genserve.v1 import weights_pb2

log = logging.getLogger(__name__)

M = TypeVar("M", weights_pb2.PushHeader, weights_pb2.LoadWeightsRequest)

_KEPT_SHARE: Final = 0.9
_HAS_ALL: Final = (weights_pb2.PUSH_STATE_STAGED, weights_pb2.PUSH_STATE_PREPARED, weights_pb2.PUSH_STATE_APPLIED)
_DISCARD_EVERY_S: Final = 0.05


class FleetPush:
    """A push that one replica receives and passes on, until all have it and have committed it.

    `replicas`: those that take it; the first receives it. Those that get no requests anyway may fail. Streams of the
    trainer's ranks join it one by one. `is_lora`: it brings an adapter, and no version. `ended` is called when nothing
    is done for it any more, also if that is after the last stream has left.
    """

    def __init__(
        self,
        fleet: Fleet,
        header: weights_pb2.PushHeader,
        replicas: Sequence[Upstream],
        ended: "Callable[[FleetPush], None]",
    ) -> None:
        self.push_id = header.push_id
        self.replicas = tuple(replicas)
        ready = set(fleet.ready)
        self._required = tuple(upstream for upstream in replicas if upstream in ready) or self.replicas
        self._fleet = fleet
        self._on_ended = ended
        self._header = header
        self.is_lora = header.HasField("lora")
        self._asked = header.action or weights_pb2.PUSH_ACTION_APPLY
        self._spread: Spread | None = None
        self._finishing: asyncio.Task[weights_pb2.PushWeightsResponse] | None = None
        self._receiving: set[asyncio.Task[weights_pb2.PushWeightsResponse]] = set()
        self._refusal = ""  # the reason of an error that ends it before all is received
        self._num_streams = 0
        self.closed = asyncio.Event()
        self.is_closing = False

    @property
    def head(self) -> Upstream:
        """The replica that receives it."""
        return self.replicas[0]

    @property
    def applies(self) -> bool:
        """Whether workers prepare it: one push of weights at a time."""
        return applies(self._header)

    @property
    def is_decided(self) -> bool:
        """Whether its outcome is known: a stream that comes now is one of a new push under this id."""
        return self._finishing is not None and self._finishing.done()

    @property
    def outcome(self) -> str:
        """OK, the reason of its error, or UNFINISHED if its trainer has left it."""
        if self._finishing is None or not self._finishing.done() or self._finishing.cancelled():
            return self._refusal or "UNFINISHED"
        error = self._finishing.exception()
        return "OK" if error is None else error.reason if isinstance(error, GenserveError) else GenserveError.reason

    @property
    def is_abandoned(self) -> bool:
        """Whether all streams have left before its outcome was known, and a repeat may go on with it."""
        return self._finishing is None and self._asked == weights_pb2.PUSH_ACTION_APPLY and not self.is_lora

    async def take(
        self, header: weights_pb2.PushHeader, frames: AsyncIterator[bytes]
    ) -> weights_pb2.PushWeightsResponse:
        """Takes one stream of the trainer; every one gets the outcome. A trainer that goes away after it has sent
        everything does not end the push: the replicas may have prepared it already, and would keep it."""
        own = self._first(header)
        heads = self.replicas if self.is_lora else (self.head,)
        is_sent = asyncio.Event()

        async def received() -> weights_pb2.PushWeightsResponse:
            answers = await relay(own, frames, heads, is_sent)
            return answers[0]

        return await self._joined(received(), is_sent)

    async def load(self, request: weights_pb2.LoadWeightsRequest) -> weights_pb2.PushWeightsResponse:
        """The same for a version that the first replica fetches from elsewhere."""
        own = self._first(request)

        async def received() -> weights_pb2.PushWeightsResponse:
            answer = await self.head.ask(self.head.weights.LoadWeights, own, FETCH_S)
            return weights_pb2.PushWeightsResponse(push=answer.push, applied=answer.applied, state=answer.state)

        return await self._joined(received(), asyncio.Event())

    async def _joined(
        self, receiving: Coroutine[Any, Any, weights_pb2.PushWeightsResponse], is_sent: asyncio.Event
    ) -> weights_pb2.PushWeightsResponse:
        """The outcome. If the caller goes away, what is received counts on only when everything is sent."""
        self._num_streams += 1
        self._begin()
        task = asyncio.create_task(self._receive(receiving, is_sent), name=f"receive push {self.push_id}")
        task.add_done_callback(_retrieved)
        self._receiving.add(task)
        task.add_done_callback(self._receiving.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not is_sent.is_set():
                task.cancel()
                await asyncio.wait({task})
            raise

    async def _receive(
        self, receiving: Coroutine[Any, Any, weights_pb2.PushWeightsResponse], is_sent: asyncio.Event
    ) -> weights_pb2.PushWeightsResponse:
        try:
            received = await self._limited(receiving, is_sent)
            if received.push.state not in _HAS_ALL:
                return received  # VALIDATE, or an answer that tells of a fault
            if self._finishing is None:
                self._finishing = asyncio.create_task(self._finish(received), name=f"finish push {self.push_id}")
                self._finishing.add_done_callback(_retrieved)
                self._finishing.add_done_callback(self._end)
            return await asyncio.shield(self._finishing)
        except GenserveError as error:
            if not isinstance(error, PushTruncatedError):
                self._refusal = error.reason  # what was cut off may still go on
            raise
        finally:
            await self._leave()

    async def _limited(
        self, receiving: Coroutine[Any, Any, weights_pb2.PushWeightsResponse], is_sent: asyncio.Event
    ) -> weights_pb2.PushWeightsResponse:
        """What is received. As long as the trainer sends, its own deadline counts; then the time of the application."""
        limit_s = apply_s(self._header.apply)
        task = asyncio.ensure_future(receiving)
        sent = asyncio.create_task(is_sent.wait())
        try:
            await asyncio.wait({task, sent}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=limit_s)
            if not task.done():
                raise DeadlineError(
                    f"replica {self.head.address} has not prepared push {self.push_id!r} in {limit_s:g} s"
                )
            return task.result()
        finally:
            sent.cancel()
            task.cancel()
            await asyncio.wait({task})

    @property
    def _first_action(self) -> "weights_pb2.PushAction.ValueType":
        """The action on replicas until all of them have the push."""
        if self._asked != weights_pb2.PUSH_ACTION_APPLY:
            return self._asked
        return weights_pb2.PUSH_ACTION_STAGE if self.is_lora else weights_pb2.PUSH_ACTION_PREPARE

    def _first(self, message: M) -> M:
        """The same, as a replica gets it before all of them have it."""
        own = type(message)()
        own.CopyFrom(message)
        own.push_id = self.push_id
        own.action = self._first_action
        own.apply.CopyFrom(_without_lease(message.apply))
        # A router that ends, or loses a replica, before the commit must not leave this in the way of the next push. An
        # adapter is in the way of no push, and another push may come while it waits for its commit.
        own.preemptible |= own.action != self._asked and not self.is_lora
        return own

    def _begin(self) -> None:
        if self._spread is not None or self.is_lora or self._asked == weights_pb2.PUSH_ACTION_VALIDATE:
            return
        self._spread = Spread(self._first(request_of(self._header)), self.replicas, self._fleet.settings.fanout)

    async def _leave(self) -> None:
        self._num_streams -= 1
        if self._num_streams or self._finishing is not None:
            return  # `_finish` ends it
        self.is_closing = True
        try:
            await self._end_spread()
            if self._refusal and not self.is_lora:
                await discard_refused(self.push_id, self.replicas)
        finally:
            self._end()

    def _end(self, _: object = None) -> None:
        self.closed.set()
        self._on_ended(self)

    async def _end_spread(self) -> None:
        if self._spread is not None:
            spread, self._spread = self._spread, None
            await spread.end()

    async def _finish(self, received: weights_pb2.PushWeightsResponse) -> weights_pb2.PushWeightsResponse:
        try:
            have = await self._having(received.push)
            if self._asked != weights_pb2.PUSH_ACTION_APPLY:
                return received
            expected = self._header.expected_version if self._header.HasField("expected_version") else None
            request = weights_pb2.CommitPushRequest(
                push_id=self.push_id, apply=self._header.apply, expected_version=expected
            )
            try:
                committed = await commit_everywhere(self._fleet, have, request, received.push)
            except GenserveError as error:
                if not may_have_done(error):
                    await discard_prepared(self.push_id, have)
                raise
            return weights_pb2.PushWeightsResponse(push=committed.push, applied=committed.applied)
        finally:
            await self._end_spread()

    async def _having(self, push: weights_pb2.Push) -> list[Upstream]:
        """The replicas that have it, when enough do."""
        if self.is_lora:
            return list(self.replicas)
        if push.state == weights_pb2.PUSH_STATE_APPLIED and self._asked == weights_pb2.PUSH_ACTION_APPLY:
            return await self._replicas_with_push()
        return [self.head, *await self._others(push)]

    async def _replicas_with_push(self) -> list[Upstream]:
        """Replicas that know a push that was applied before. Replicas that joined later do not."""
        await self._end_spread()
        request = weights_pb2.GetPushRequest(push_id=self.push_id)
        outcomes = await everywhere(self.replicas, lambda each: each.ask(each.weights.GetPush, request, ASK_S))
        known = [
            upstream
            for upstream, outcome in outcomes.items()
            if not isinstance(outcome, GenserveError) and outcome.push.state in _HAS_ALL
        ]
        return known or [self.head]

    async def _others(self, push: weights_pb2.Push) -> list[Upstream]:
        """Waits until the other replicas have the push, and returns those that do. Discards it everywhere and raises
        FleetPushError if they are too few."""
        if self._spread is None:
            return []
        tasks = self._spread.tasks
        # Then the first replica does not keep it any more, see `prepared_ttl`.
        until_s = time.monotonic() + _KEPT_SHARE * prepared_ttl_s(self._header)
        have: list[Upstream] = []
        failures: dict[Upstream, str] = {}
        waiting = set(tasks.values())
        by_task = {task: upstream for upstream, task in tasks.items()}
        while waiting:
            left_s = until_s - time.monotonic()
            if self._is_enough([self.head, *have]):
                left_s = min(left_s, self._fleet.settings.straggler_s)
            done, waiting = await asyncio.wait(
                waiting,
                timeout=max(0.0, left_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                upstream = by_task[task]
                failure = _failure(task, push)
                if failure:
                    failures[upstream] = failure
                else:
                    have.append(upstream)
            if not done or not self._is_enough(set(self.replicas) - failures.keys()):
                break
        if not self._is_enough([self.head, *have]):
            failures |= {by_task[task]: "it is too slow" for task in waiting if not failures}
            await self.discard()
            needed = self._fleet.settings.min_replicas or len(self._required)
            raise FleetPushError(
                f"nothing was changed, because {needed} of {len(self.replicas)} replicas have to take push "
                f"{self.push_id!r}; {_listed(failures)}",
                metadata={"push_id": self.push_id},
            )
        for task in waiting:
            failures[by_task[task]] = "it is too slow"
        for upstream, failure in failures.items():
            log.warning("push %s goes on without replica %s: %s", self.push_id, upstream.address, failure)
        return have

    def _is_enough(self, replicas: Collection[Upstream]) -> bool:
        """Whether these may serve it without the others. One that was removed meanwhile is not waited for."""
        if needed := self._fleet.settings.min_replicas:
            return len(replicas) >= min(needed, sum(not each.member.is_gone for each in self.replicas))
        return all(each in replicas or each.member.is_gone for each in self._required)

    async def discard(self) -> None:
        """Frees its bytes on all replicas, as far as they answer: those of a prepared push would be in the way of the
        next one."""
        await self._end_spread()
        await discard(self.push_id, self.replicas)


def _failure(task: "asyncio.Task[weights_pb2.Push]", push: weights_pb2.Push) -> str:
    """Why a replica does not have the push that the first one has; "" = it has."""
    try:
        own = task.result()
    except GenserveError as error:
        return error.message
    if own.state not in _HAS_ALL:
        return f"the push is {weights_pb2.PushState.Name(own.state)} there"
    if own.content_digest and push.content_digest and own.content_digest != push.content_digest:
        return "it has other bytes"
    return ""


def _listed(failures: "dict[Upstream, str]") -> str:
    shown = [f"{upstream.address}: {failure}" for upstream, failure in list(failures.items())[:3]]
    return "; ".join([*shown, *([f"and {len(failures) - 3} more"] if len(failures) > 3 else [])])


def _without_lease(apply: weights_pb2.ApplyOptions) -> weights_pb2.ApplyOptions:
    own = weights_pb2.ApplyOptions()
    own.CopyFrom(apply)
    own.pause_lease_id = ""
    return own


def _retrieved(task: "asyncio.Task[weights_pb2.PushWeightsResponse]") -> None:
    if not task.cancelled():
        task.exception()  # if no stream waits for it any more


async def discard(push_id: str, replicas: Iterable[Upstream]) -> None:
    """Frees the bytes of a push on these replicas, as far as they answer: what a failed one leaves would be in the way
    of the next one."""
    await everywhere(replicas, lambda upstream: _discard_on(upstream, push_id))


async def discard_prepared(push_id: str, replicas: Iterable[Upstream]) -> None:
    """The same on replicas that have not begun to apply it."""

    async def discard_one(upstream: Upstream) -> None:
        if await _state(upstream, push_id) == weights_pb2.PUSH_STATE_PREPARED:
            await _discard_on(upstream, push_id)

    await everywhere(replicas, discard_one)


async def discard_refused(push_id: str, replicas: Sequence[Upstream]) -> None:
    """What the first replica does not have is not kept by the others; it may have refused one stream of many."""
    try:
        if await _state(replicas[0], push_id) in _HAS_ALL:
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
