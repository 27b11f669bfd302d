"""FleetService."""

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any, Final

from genserve.fleet.hand_over import only_there
from genserve.fleet.router import Router
from genserve.fleet.upstream import Upstream
from genserve.routing.replica import ReplicaState
from genserve.rpc.convert.control import watch_seconds
from genserve.rpc.watchers import Watchers
from genserve.v1 import fleet_pb2
from genserve.v1.fleet_pb2_grpc import FleetServiceServicer

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

_TOLD_S: Final = 0.05
"""Watchers that ask within so many seconds, with no change between, get the same message."""
_STATES = {
    ReplicaState.CONNECTING: fleet_pb2.REPLICA_STATE_CONNECTING,
    ReplicaState.SYNCING: fleet_pb2.REPLICA_STATE_SYNCING,
    ReplicaState.READY: fleet_pb2.REPLICA_STATE_READY,
    ReplicaState.DRAINING: fleet_pb2.REPLICA_STATE_DRAINING,
    ReplicaState.UNHEALTHY: fleet_pb2.REPLICA_STATE_UNHEALTHY,
    ReplicaState.GONE: fleet_pb2.REPLICA_STATE_UNSPECIFIED,
}


class FleetReplicas(FleetServiceServicer):
    """Lists, adds and removes replicas."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._watchers = Watchers("the replicas", "end some that nobody reads, or ask ListReplicas from time to time")
        self._message = fleet_pb2.WatchReplicasResponse()
        self._change_before: asyncio.Event | None = None  # the change that would make it old
        self._made_at_s = 0.0

    async def ListReplicas(
        self, request: fleet_pb2.ListReplicasRequest, context: "ServicerContext[Any, Any]"
    ) -> fleet_pb2.ListReplicasResponse:
        """All replicas."""
        fleet = self._router.fleet
        return fleet_pb2.ListReplicasResponse(
            replicas=self._replicas(),
            weight_version=self._router.weight_version,
            decisions=[
                fleet_pb2.PolicyDecisions(policy=policy, num_requests=count)
                for policy, count in fleet.chain.num_decided.items()
            ],
            fleet=fleet.record(),
        )

    async def WatchReplicas(  # type: ignore[override]  # the stubs know generators only
        self,
        request: fleet_pb2.WatchReplicasRequest,
        context: "ServicerContext[fleet_pb2.WatchReplicasRequest, fleet_pb2.WatchReplicasResponse]",
    ) -> None:
        """All replicas, whenever the state of one has changed, and after an interval without a change. Ends when the
        router shuts down."""
        interval_s = watch_seconds(request, "interval", math.inf)
        with self._watchers.joined():
            while True:
                is_last = self._router.is_draining
                changed = self._router.fleet.states_changed.next
                await context.write(self._watched(changed))
                if is_last:
                    return
                try:
                    async with asyncio.timeout(None if math.isinf(interval_s) else interval_s):
                        await changed.wait()
                except TimeoutError:
                    pass

    async def AddReplica(
        self, request: fleet_pb2.AddReplicaRequest, context: "ServicerContext[Any, Any]"
    ) -> fleet_pb2.AddReplicaResponse:
        """Adds one."""
        return fleet_pb2.AddReplicaResponse(replica=self._replica(self._router.add(request.address, joins=True)))

    async def RemoveReplica(
        self, request: fleet_pb2.RemoveReplicaRequest, context: "ServicerContext[Any, Any]"
    ) -> fleet_pb2.RemoveReplicaResponse:
        """Removes one."""
        upstream = self._router.find(request.address)
        if not request.force:
            await self._router.check_not_last(request.address)
        replica = self._replica(upstream)
        await self._router.remove(request.address)
        return fleet_pb2.RemoveReplicaResponse(replica=replica)

    async def DrainReplica(
        self, request: fleet_pb2.DrainReplicaRequest, context: "ServicerContext[Any, Any]"
    ) -> fleet_pb2.DrainReplicaResponse:
        """Removes one when its requests have ended."""
        upstream = self._router.find(request.address)
        if not request.force:
            await self._router.check_not_last(request.address)
        await self._router.drain(request.address, force=request.force)
        return fleet_pb2.DrainReplicaResponse(replica=self._replica(upstream))

    def _watched(self, changed: asyncio.Event) -> fleet_pb2.WatchReplicasResponse:
        """The message for watchers now: made once for all of them. `changed`: set by the next change."""
        now_s = time.monotonic()
        if self._change_before is not changed or now_s > self._made_at_s + _TOLD_S:
            self._change_before, self._made_at_s = changed, now_s
            self._message = fleet_pb2.WatchReplicasResponse(
                replicas=self._replicas(), weight_version=self._router.weight_version
            )
        return self._message

    def _replicas(self) -> list[fleet_pb2.Replica]:
        upstreams = self._router.fleet.upstreams
        return [self._replica(upstreams[address]) for address in sorted(upstreams)]

    def _replica(self, upstream: Upstream) -> fleet_pb2.Replica:
        member = upstream.member
        state, reason = self._router.fleet.where(member)
        if state is ReplicaState.DRAINING and (what := only_there(self._router.fleet, member)):
            reason = f"{reason}, and nobody else has {what} yet"
        if state is ReplicaState.READY and member.missing_loras:
            names = ", ".join(map(repr, member.missing_loras))
            reason = member.sync_failure or f"it gets no requests for adapter {names} yet, which it fetches"
        return fleet_pb2.Replica(
            address=member.address,
            state=_STATES[state],
            reason=reason,
            engine=member.engine,
            load=member.load,
            inflight=member.inflight,
            max_num_seqs=member.max_num_seqs if member.kind is not None else 0,
            push_id=member.version.push_id if member.version is not None else "",
            content_digest=member.version.content_digest if member.version is not None else "",
            pushes=member.pushes,
        )
