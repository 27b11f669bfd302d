"""The pushes that are on their way to the replicas."""

import asyncio
import logging
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from genserve.errors import ApplyInProgressError, GenserveError, NoReplicaError, PushNotFoundError
from genserve.fleet.everywhere import everywhere
from genserve.fleet.fleet import Fleet
from genserve.fleet.push.commit import commit_everywhere, merged
from genserve.fleet.push.fleet_push import FleetPush
from genserve.fleet.push.header import applies, header_of
from genserve.fleet.upstream import ASK_S, DISCARD_S, FETCH_S, Upstream
from genserve.routing.replica import ReplicaState
from genserve.v1 import weights_pb2
from genserve.wire.bounds import MAX_PEERS

log = logging.getLogger(__name__)

_MAX_HEADS: Final = 64


class FleetPushes:
    """Finds the push that a stream belongs to, and the replicas that know of a push."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._live: dict[str, FleetPush] = {}
        self.outcomes: Counter[str] = Counter()
        """The answers of pushes that are over."""
        self._abandoned: FleetPush | None = None
        self._clearing: set[asyncio.Task[None]] = set()
        self._committing: dict[str, asyncio.Task[weights_pb2.CommitPushResponse]] = {}
        self._adapters: set[str] = set()  # of these; an adapter is in the way of no push, and may wait for its turn
        # The replica that received each push, so that a stream that was cut off goes on where its bytes are.
        self._heads: OrderedDict[str, str] = OrderedDict()

    @property
    def are_live(self) -> bool:
        """Whether a push is on its way, or being committed."""
        return bool(self._live or self._committing)

    @property
    def num_live(self) -> int:
        """Pushes that are on their way, or being committed."""
        return len(self._live.keys() | self._committing.keys())

    def includes(self, upstream: Upstream) -> bool:
        """Whether a replica is about to get a push of weights."""
        return bool(self._committing.keys() - self._adapters) or any(
            upstream in push.replicas for push in self._live.values() if not (push.is_lora or push.is_decided)
        )

    async def take(
        self, header: weights_pb2.PushHeader, frames: AsyncIterator[bytes]
    ) -> weights_pb2.PushWeightsResponse:
        """Takes one stream of a trainer, and returns the outcome."""
        header.push_id = header.push_id or uuid.uuid4().hex
        return await self._run(header, lambda push: push.take(header, frames))

    async def load(self, request: weights_pb2.LoadWeightsRequest) -> weights_pb2.PushWeightsResponse:
        """The same for a version that a replica fetches from elsewhere."""
        request.ClearField("fleet")  # what the fleet is this router says
        header = header_of(request)
        header.push_id = header.push_id or uuid.uuid4().hex
        if request.WhichOneof("source") == "previous" and header.push_id not in self._heads:
            await self._fleet.until_known()
            if (reader := await reader_of_previous(self._fleet, request)) is not None:
                self._heads[header.push_id] = reader.address
        return await self._run(header, lambda push: push.load(request))

    async def _run(
        self,
        header: weights_pb2.PushHeader,
        take: Callable[[FleetPush], Awaitable[weights_pb2.PushWeightsResponse]],
    ) -> weights_pb2.PushWeightsResponse:
        await self._fleet.until_known()
        if applies(header):
            await self._clear(header.push_id)
        if header.manifest.partial and not self._fleet.ready:  # it goes to replicas that have the version
            await self._fleet.until_read()
        while (push := self._live.get(header.push_id)) is not None and push.is_closing:
            await push.closed.wait()
        if push is None or push.is_decided or header.action == weights_pb2.PUSH_ACTION_VALIDATE:
            push = self._begun(header)
            if header.action != weights_pb2.PUSH_ACTION_VALIDATE:  # which takes no bytes, and no other stream
                self._live[header.push_id] = push
        return await take(push)

    def _ended(self, push: FleetPush) -> None:
        if self._live.get(push.push_id) is push:
            del self._live[push.push_id]
            self.outcomes[push.outcome] += 1
            if push.is_abandoned:
                self._abandoned = push
            self._fleet.states_changed.notify()  # replicas that wait to fetch a version may go on

    async def _clear(self, push_id: str) -> None:
        """What a trainer has left in the middle is kept for its repeat, but not in the way of another push."""
        abandoned, self._abandoned = self._abandoned, None
        if abandoned is not None and abandoned.push_id != push_id:
            clearing = asyncio.create_task(abandoned.discard(), name=f"discard push {abandoned.push_id}")
            self._clearing.add(clearing)
            clearing.add_done_callback(self._clearing.discard)
        if self._clearing:
            await asyncio.wait(self._clearing)

    def _check_alone(self, push_id: str) -> None:
        """Raises ApplyInProgressError while another push changes the version."""
        others = [push.push_id for push in self._live.values() if push.applies and not push.is_decided]
        for other in (*others, *(self._committing.keys() - self._adapters)):
            if other != push_id:
                raise ApplyInProgressError(
                    f"push {other!r} is on its way to the replicas", metadata={"push_id": other}, retry_after_s=1.0
                )

    def _begun(self, header: weights_pb2.PushHeader) -> FleetPush:
        if applies(header):
            self._check_alone(header.push_id)
        if header.apply.pause_lease_id:
            self._fleet.leases.get(header.apply.pause_lease_id)
        replicas = self._fleet.ready
        if not header.manifest.partial:  # a replica with another version cannot take a part of one
            replicas = replicas + self._fleet.in_state(ReplicaState.SYNCING)
        if not replicas:
            raise NoReplicaError(f"no replica can take a push: {self._fleet.why_none()}", retry_after_s=1.0)
        head = self._heads.get(header.push_id)
        replicas.sort(key=lambda upstream: upstream.address != head)
        self._heads[header.push_id] = replicas[0].address
        self._heads.move_to_end(header.push_id)
        while len(self._heads) > _MAX_HEADS:
            self._heads.popitem(last=False)
        return FleetPush(self._fleet, header, replicas, self._ended)

    async def report(self, push_id: str) -> weights_pb2.GetPushResponse:
        """How far a push has come where it is received, and what applying it did on all replicas. Raises
        PushNotFoundError."""
        answers = await self._ask_all(push_id)
        head = self._heads.get(push_id, "")
        first = answers.get(head) or next(iter(answers.values()))
        applied = [answer.applied for answer in answers.values() if answer.HasField("applied")]
        return weights_pb2.GetPushResponse(push=first.push, applied=merged(applied))

    async def commit(self, request: weights_pb2.CommitPushRequest) -> weights_pb2.CommitPushResponse:
        """Commits a push that is staged or prepared, on every replica. It goes on if the caller is cancelled."""
        committing = self._committing.get(request.push_id)
        if committing is None:
            committing = asyncio.create_task(self._commit(request), name=f"commit push {request.push_id}")
            self._committing[request.push_id] = committing
            committing.add_done_callback(lambda done: self._committed(request.push_id, done))
        return await asyncio.shield(committing)

    def _committed(self, push_id: str, task: "asyncio.Task[weights_pb2.CommitPushResponse]") -> None:
        del self._committing[push_id]
        self._adapters.discard(push_id)
        if not task.cancelled():
            task.exception()  # if nobody waits for it
        self._fleet.states_changed.notify()

    async def _commit(self, request: weights_pb2.CommitPushRequest) -> weights_pb2.CommitPushResponse:
        await self._fleet.until_known()
        if len(self._fleet.ready) < max(1, self._fleet.settings.min_replicas):  # some may be just being read
            await self._fleet.until_read()
        answers = await self._ask_all(request.push_id)
        push = next(iter(answers.values())).push
        if push.lora_name:
            self._adapters.add(request.push_id)
        else:
            self._check_alone(request.push_id)
        ready = self._fleet.ready
        have = [upstream for upstream in ready or self._takers() if upstream.address in answers]
        lacking = [upstream for upstream in ready if upstream.address not in answers]
        if have and lacking and not push.lora_name:
            have += await self._brought(push, have, lacking)
        needed = self._fleet.settings.min_replicas or len(ready)
        if not have or len(have) < needed:
            raise NoReplicaError(
                f"{len(have)} replicas have push {request.push_id!r}, {needed} have to: nothing was changed"
            )
        return await commit_everywhere(self._fleet, have, request, push)

    async def _brought(self, push: weights_pb2.Push, have: list[Upstream], lacking: list[Upstream]) -> list[Upstream]:
        """Brings it to replicas that have joined since it was staged, and returns those that have it now."""
        is_prepared = push.state == weights_pb2.PUSH_STATE_PREPARED
        request = weights_pb2.LoadWeightsRequest(
            push_id=push.push_id,
            weight_version=push.weight_version,
            action=weights_pb2.PUSH_ACTION_PREPARE if is_prepared else weights_pb2.PUSH_ACTION_STAGE,
            peers=weights_pb2.WeightPeers(
                addresses=[upstream.address for upstream in have[:MAX_PEERS]], push_id=push.push_id
            ),
            content_digest=push.content_digest,
        )
        outcomes = await everywhere(
            lacking, lambda upstream: upstream.ask(upstream.weights.LoadWeights, request, FETCH_S)
        )
        for upstream, outcome in outcomes.items():
            if isinstance(outcome, GenserveError):
                log.warning("replica %s does not get push %s: %s", upstream.address, push.push_id, outcome.message)
        return [upstream for upstream, outcome in outcomes.items() if not isinstance(outcome, GenserveError)]

    async def discard(self, request: weights_pb2.DiscardPushRequest) -> weights_pb2.DiscardPushResponse:
        """Frees the bytes of a push on all replicas. Raises PushNotFoundError, or the error of a replica that does not
        discard it."""
        outcomes = await everywhere(
            self._takers(), lambda upstream: upstream.ask(upstream.weights.DiscardPush, request, DISCARD_S)
        )
        answers = [each for each in outcomes.values() if not isinstance(each, GenserveError)]
        for outcome in outcomes.values():
            if isinstance(outcome, GenserveError) and not isinstance(outcome, PushNotFoundError):
                raise outcome.again()
        if not answers:
            raise PushNotFoundError(
                f"no replica knows the push {request.push_id!r}", metadata={"push_id": request.push_id}
            )
        return weights_pb2.DiscardPushResponse(push=answers[0].push)

    async def replica_with(self, push_id: str) -> Upstream:
        """A replica that knows a push: the one that receives it, if that one does. Raises PushNotFoundError."""
        answers = await self._ask_all(push_id)
        head = self._heads.get(push_id, "")
        return self._fleet.upstreams[head if head in answers else next(iter(answers))]

    def _takers(self) -> list[Upstream]:
        return self._fleet.in_state(ReplicaState.READY, ReplicaState.SYNCING)

    async def _ask_all(self, push_id: str) -> dict[str, weights_pb2.GetPushResponse]:
        """The answers of the replicas that know a push. Raises PushNotFoundError if none does, and the error of one
        that does not answer if no other one knows it."""
        request = weights_pb2.GetPushRequest(push_id=push_id)
        answers: dict[str, weights_pb2.GetPushResponse] = {}
        failure: GenserveError | None = None
        outcomes = await everywhere(
            self._takers(), lambda upstream: upstream.ask(upstream.weights.GetPush, request, ASK_S)
        )
        for upstream, outcome in outcomes.items():
            if not isinstance(outcome, GenserveError):
                answers[upstream.address] = outcome
            elif not isinstance(outcome, PushNotFoundError):
                failure = outcome
        if not answers:
            not_found = PushNotFoundError(f"no replica knows the push {push_id!r}", metadata={"push_id": push_id})
            raise not_found if failure is None else failure.again()
        return answers


async def reader_of_previous(fleet: Fleet, request: weights_pb2.LoadWeightsRequest) -> Upstream | None:
    """The replica to read the version before from: one that has the fleet's, and if this router has not seen that or
    nobody has kept it, one that has what most of them have: their disks differ after canaries, and where one was away.
    None if no replica is ready; raises the error of one if none has any."""
    asked = weights_pb2.LoadWeightsRequest()
    asked.CopyFrom(request)
    asked.push_id, asked.action = uuid.uuid4().hex, weights_pb2.PUSH_ACTION_VALIDATE
    asked.ClearField("apply")
    outcomes = await everywhere(fleet.ready, lambda each: each.ask(each.weights.LoadWeights, asked, ASK_S))
    found = {
        upstream: outcome.push.weight_version
        for upstream, outcome in outcomes.items()
        if not isinstance(outcome, GenserveError)
    }
    if not found:
        for outcome in outcomes.values():
            if isinstance(outcome, GenserveError):
                raise outcome.again()
        return None
    counts = Counter(found.values())
    before = None if fleet.previous is None else fleet.previous.number
    return max(found, key=lambda upstream: (found[upstream] == before, counts[found[upstream]]))
