"""The calls of FleetService."""

from genserve.client.fleet.replicas import FleetReplica, Replicas
from genserve.transport.connection import UNSET, ServiceCalls, Timeout
from genserve.transport.fields import build, optional_duration
from genserve.transport.response_stream import ResponseStream
from genserve.v1 import fleet_pb2


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
