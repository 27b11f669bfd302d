"""One push for all replicas."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from genserve.errors import ApplyInProgressError, DeadlineError, FleetPushError, GenserveError, PushTruncatedError
from genserve.fleet.everywhere import everywhere
from genserve.fleet.fleet import Fleet
from genserve.fleet.push.commit import commit_everywhere
from genserve.fleet.push.relay import relay
from genserve.fleet.push.spread import Spread
from genserve.fleet.upstream import Upstream
from genserve.v1 import weights_pb2
from genserve.wire import seconds_of

log = logging.getLogger(__name__)

_DEFAULT_APPLY_S = 300.0
_ANSWER_S = 30.0
_DEFAULT_PREPARED_TTL_S = 60.0  # of a daemon
_KEPT_SHARE = 0.9
_DISCARD_TIMEOUT_S = 30.0
_DISCARD_EVERY_S = 0.05
_HAS_ALL = (weights_pb2.PUSH_STATE_STAGED, weights_pb2.PUSH_STATE_PREPARED, weights_pb2.PUSH_STATE_APPLIED)


class FleetPush:
    """A push that one replica receives and passes on, until all have it and have committed it.

    `replicas`: who takes it; the first one receives it. Streams of the trainer's ranks join it one by one.
    """

    def __init__(
        self,
        fleet: Fleet,
        header: weights_pb2.PushHeader,
        replicas: Sequence[Upstream],
        ended: "Callable[[FleetPush], None]",
    ) -> None:
        """`ended` is called when nobody sends it any more, and nothing is left to be done for it."""
        self.push_id = header.push_id
        self.replicas = tuple(replicas)
        self._fleet = fleet
        self._ended = ended
        self._header = header
        self._is_lora = header.HasField("lora")
        self._asked = header.action or weights_pb2.PUSH_ACTION_APPLY
        self._spread: Spread | None = None
        self._finishing: asyncio.Task[weights_pb2.PushWeightsResponse] | None = None
        self._receiving: set[asyncio.Task[weights_pb2.PushWeightsResponse]] = set()
        self._is_refused = False
        self.num_streams = 0

    @property
    def head(self) -> Upstream:
        """Who receives it."""
        return self.replicas[0]

    @property
    def applies(self) -> bool:
        """Whether workers prepare it: one push at a time."""
        return not self._is_lora and self._asked in (weights_pb2.PUSH_ACTION_APPLY, weights_pb2.PUSH_ACTION_PREPARE)

    @property
    def is_over(self) -> bool:
        """Whether nobody sends it any more, and nothing is to be done for it."""
        return self.num_streams == 0 and (self._finishing is None or self._finishing.done())

    async def take(
        self, header: weights_pb2.PushHeader, frames: AsyncIterator[bytes]
    ) -> weights_pb2.PushWeightsResponse:
        """Takes one stream of the trainer; every one gets the outcome. A trainer that goes away after it has sent
        everything does not end the push: the replicas may have prepared it already, and would keep it."""
        own = weights_pb2.PushHeader()
        own.CopyFrom(header)
        own.action = self._first_action
        own.apply.CopyFrom(_without_lease(header.apply))
        heads = self.replicas if self._is_lora else (self.head,)
        is_sent = asyncio.Event()

        async def received() -> weights_pb2.PushWeightsResponse:
            answers = await relay(own, frames, heads, is_sent)
            return answers[0]

        return await self._joined(received(), is_sent)

    async def load(self, request: weights_pb2.LoadWeightsRequest) -> weights_pb2.PushWeightsResponse:
        """The same for a version that the first replica fetches from elsewhere."""
        own = weights_pb2.LoadWeightsRequest()
        own.CopyFrom(request)
        own.push_id = self.push_id
        own.action = self._first_action
        own.apply.CopyFrom(_without_lease(request.apply))

        async def received() -> weights_pb2.PushWeightsResponse:
            call = self.head.weights.LoadWeights(own)
            with self.head.running(call), self.head.raising():
                answer: weights_pb2.LoadWeightsResponse = await call
            return weights_pb2.PushWeightsResponse(push=answer.push, applied=answer.applied, state=answer.state)

        return await self._joined(received(), asyncio.Event())

    async def _joined(
        self, receiving: Coroutine[Any, Any, weights_pb2.PushWeightsResponse], is_sent: asyncio.Event
    ) -> weights_pb2.PushWeightsResponse:
        """The outcome. If the caller goes away, what is received counts on only when everything is sent."""
        self.num_streams += 1
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
            return await asyncio.shield(self._finishing)
        except GenserveError as error:
            if not isinstance(error, PushTruncatedError):
                self._is_refused = True  # what was cut off may still go on
            raise
        finally:
            await self._leave()

    async def _limited(
        self, receiving: Coroutine[Any, Any, weights_pb2.PushWeightsResponse], is_sent: asyncio.Event
    ) -> weights_pb2.PushWeightsResponse:
        """What is received. As long as the trainer sends, its own deadline counts; then the time of the application."""
        limit_s = (seconds_of(self._header.apply.timeout) or _DEFAULT_APPLY_S) + _ANSWER_S
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
        """What replicas do with it before all of them have it."""
        if self._asked != weights_pb2.PUSH_ACTION_APPLY:
            return self._asked
        return weights_pb2.PUSH_ACTION_STAGE if self._is_lora else weights_pb2.PUSH_ACTION_PREPARE

    def _begin(self) -> None:
        if self._spread is not None or self._is_lora or self._asked == weights_pb2.PUSH_ACTION_VALIDATE:
            return
        header = self._header
        request = weights_pb2.LoadWeightsRequest(
            push_id=self.push_id,
            weight_version=header.weight_version,
            expected_version=header.expected_version if header.HasField("expected_version") else None,
            force=header.force,
            action=self._first_action,
            apply=_without_lease(header.apply),
            content_digest=header.content_digest,
        )
        for field in ("staging_ttl", "prepared_ttl"):
            if header.HasField(field):
                getattr(request, field).CopyFrom(getattr(header, field))
        self._spread = Spread(request, self.replicas, self._fleet.settings.fanout)

    async def _leave(self) -> None:
        self.num_streams -= 1
        if not self.is_over:
            return
        spread, self._spread = self._spread, None
        try:
            if spread is not None:
                await spread.end()
                if self._is_refused and self._finishing is None:
                    await everywhere(self.replicas[1:], self._discard_on)
        finally:
            if self.num_streams == 0:
                self._ended(self)

    async def _finish(self, received: weights_pb2.PushWeightsResponse) -> weights_pb2.PushWeightsResponse:
        have = [self.head, *await self._others(received.push)] if not self._is_lora else list(self.replicas)
        if self._asked != weights_pb2.PUSH_ACTION_APPLY:
            return received
        expected = self._header.expected_version if self._header.HasField("expected_version") else None
        request = weights_pb2.CommitPushRequest(
            push_id=self.push_id, apply=self._header.apply, expected_version=expected
        )
        committed = await commit_everywhere(self._fleet, have, request)
        return weights_pb2.PushWeightsResponse(push=committed.push, applied=committed.applied)

    async def _others(self, push: weights_pb2.Push) -> list[Upstream]:
        """Waits until the other replicas have the push, and returns those that do. Discards it everywhere and raises
        FleetPushError if they are too few."""
        if self._spread is None:
            return []
        tasks = self._spread.tasks
        settings = self._fleet.settings
        needed = settings.min_replicas or len(self.replicas)
        # Then the first replica does not keep it any more, see `prepared_ttl`.
        until_s = time.monotonic() + _KEPT_SHARE * (seconds_of(self._header.prepared_ttl) or _DEFAULT_PREPARED_TTL_S)
        have: list[Upstream] = []
        failures: dict[str, str] = {}
        waiting = set(tasks.values())
        by_task = {task: upstream for upstream, task in tasks.items()}
        while waiting:
            is_enough = 1 + len(have) >= needed
            left_s = until_s - time.monotonic()
            done, waiting = await asyncio.wait(
                waiting,
                timeout=max(0.0, min(left_s, settings.straggler_s) if is_enough else left_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                upstream = by_task[task]
                failure = _failure(task, push)
                if failure:
                    failures[upstream.address] = failure
                else:
                    have.append(upstream)
            if not done or len(self.replicas) - len(failures) < needed:
                break
        if 1 + len(have) < needed:
            failures |= {by_task[task].address: "it is too slow" for task in waiting if not failures}
            await self.discard()
            raise FleetPushError(
                f"nothing was changed, because {needed} of {len(self.replicas)} replicas have to take push "
                f"{self.push_id!r}; {_told(failures)}",
                metadata={"push_id": self.push_id},
            )
        for task in waiting:
            failures[by_task[task].address] = "it is too slow"
        for address, failure in failures.items():
            log.warning("push %s goes on without replica %s: %s", self.push_id, address, failure)
        return have

    async def discard(self) -> None:
        """Frees its bytes on all replicas, as far as they answer: those of a prepared push would be in the way of the
        next one."""
        if self._spread is not None:
            await self._spread.end()
        await everywhere(self.replicas, self._discard_on)

    async def _discard_on(self, upstream: Upstream) -> None:
        request = weights_pb2.DiscardPushRequest(push_id=self.push_id, force=True)
        until_s = time.monotonic() + _DISCARD_TIMEOUT_S
        while True:
            try:
                await upstream.ask(upstream.weights.DiscardPush, request, _DISCARD_TIMEOUT_S)
                return
            except ApplyInProgressError:
                # It is prepared there, and can be discarded when that is done.
                if time.monotonic() >= until_s:
                    raise
                await asyncio.sleep(_DISCARD_EVERY_S)


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


def _told(failures: "dict[str, str]") -> str:
    shown = [f"{address}: {failure}" for address, failure in list(failures.items())[:3]]
    return "; ".join([*shown, *([f"and {len(failures) - 3} more"] if len(failures) > 3 else [])])


def _without_lease(apply: weights_pb2.ApplyOptions) -> weights_pb2.ApplyOptions:
    own = weights_pb2.ApplyOptions()
    own.CopyFrom(apply)
    own.pause_lease_id = ""
    return own


def _retrieved(task: "asyncio.Task[weights_pb2.PushWeightsResponse]") -> None:
    if not task.cancelled():
        task.exception()  # if no stream waits for it any more
