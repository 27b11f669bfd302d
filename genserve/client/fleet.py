"""The calls of FleetService, and what they return: the replicas of a router."""

from dataclasses import dataclass, field

from google.protobuf.message import Message

from genserve.client.state import EngineState, Load, PushInFlight
from genserve.transport.connection import UNSET, ServiceCalls, Timeout
from genserve.transport.fields import build, optional_duration, word_of
from genserve.transport.streams import ResponseStream
from genserve.v1 import fleet_pb2


@dataclass(frozen=True, slots=True)
class FleetReplica:
    """A replica. `state` is one of connecting, syncing, ready, draining, unhealthy; only ready ones get requests, and
    `reason` says why it is not ready.

    `engine` and `load`: as it last told, None before it has answered. `inflight`: sequences that the router has sent to
    it and that have not ended. `push_id`: of the push that brought its weights, "" = its checkpoint. `content_digest`:
    of its weights, "" = not known. `pushes`: those in flight there, as it last told.
    """

    address: str
    state: str
    reason: str
    engine: EngineState | None
    load: Load | None
    inflight: int
    max_num_seqs: int
    push_id: str
    content_digest: str
    pushes: list[PushInFlight] = field(default_factory=list)

    @classmethod
    def of(cls, message: fleet_pb2.Replica) -> "FleetReplica":
        """From the wire."""
        return cls(
            address=message.address,
            state=word_of(fleet_pb2.ReplicaState, message.state),
            reason=message.reason,
            engine=EngineState.of(message.engine) if message.HasField("engine") else None,
            load=Load.of(message.load) if message.HasField("load") else None,
            inflight=message.inflight,
            max_num_seqs=message.max_num_seqs,
            push_id=message.push_id,
            content_digest=message.content_digest,
            pushes=[PushInFlight.of(push) for push in message.pushes],
        )


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of a fleet in order of their addresses, and the version that it serves. `decisions`: how many
    requests each policy has decided; empty in what `watch_replicas` yields."""

    replicas: list[FleetReplica]
    weight_version: int
    decisions: dict[str, int]
    message: Message = field(repr=False, compare=False)
    """The original message."""

    @classmethod
    def of(cls, message: fleet_pb2.ListReplicasResponse | fleet_pb2.WatchReplicasResponse) -> "Replicas":
        """From the wire."""
        decisions = message.decisions if isinstance(message, fleet_pb2.ListReplicasResponse) else ()
        return cls(
            replicas=[FleetReplica.of(each) for each in message.replicas],
            weight_version=message.weight_version,
            decisions={each.policy: each.num_requests for each in decisions},
            message=message,
        )


class FleetCalls(ServiceCalls):
    """The replicas of a router (`genserve route`). A daemon does not have these calls: UnsupportedError."""

    async def list_replicas(self, *, timeout_s: Timeout = UNSET) -> Replicas:
        """The replicas, the version of the fleet, and how many requests each policy has decided."""
        request = fleet_pb2.ListReplicasRequest()
        response = await self._connection.unary(self._connection.fleet.ListReplicas, request, timeout_s)
        return Replicas.of(response)

    def watch_replicas(
        self, *, interval_s: float | None = None, timeout_s: float | None = None
    ) -> ResponseStream[Replicas]:
        """Yields the replicas, at once and then whenever the state of one has changed; every `interval_s`, at least
        0.1, if nothing changes. It continues until it is closed."""
        request = fleet_pb2.WatchReplicasRequest(interval=optional_duration(interval_s, "interval_s"))
        return self._connection.stream(self._connection.fleet.WatchReplicas, request, timeout_s, Replicas.of)

    async def add_replica(self, address: str, *, timeout_s: Timeout = UNSET) -> FleetReplica:
        """Adds the daemon at HOST:PORT or unix:PATH. It gets requests when it serves the version of the fleet, which it
        fetches from another replica. May be repeated."""
        request = build(fleet_pb2.AddReplicaRequest, {"address": address})
        response = await self._connection.unary(self._connection.fleet.AddReplica, request, timeout_s)
        return FleetReplica.of(response.replica)

    async def remove_replica(self, address: str, *, force: bool = False, timeout_s: Timeout = UNSET) -> FleetReplica:
        """Removes a replica at once, and cuts its requests off. Raises ReplicaNotFoundError, and LastReplicaError if
        nobody else has the version of the fleet, unless `force` gives that up."""
        request = build(fleet_pb2.RemoveReplicaRequest, {"address": address, "force": force})
        response = await self._connection.unary(self._connection.fleet.RemoveReplica, request, timeout_s)
        return FleetReplica.of(response.replica)

    async def drain_replica(self, address: str, *, force: bool = False, timeout_s: float = 300.0) -> FleetReplica:
        """Removes a replica when its requests have ended; it gets no new ones. If `timeout_s` ends first, it goes on
        draining. Raises ReplicaNotFoundError, and LastReplicaError if nobody else has the version of the fleet, unless
        `force` gives that up."""
        request = build(fleet_pb2.DrainReplicaRequest, {"address": address, "force": force})
        response = await self._connection.unary(self._connection.fleet.DrainReplica, request, timeout_s)
        return FleetReplica.of(response.replica)
