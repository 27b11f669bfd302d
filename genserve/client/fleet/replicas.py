"""The replicas of a fleet as its router reports them."""

from dataclasses import dataclass, field

from google.protobuf.message import Message

from genserve.client.control.state import EngineState, Load, PushInFlight
from genserve.transport.enums import word_of
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
