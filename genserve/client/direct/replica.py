"""A replica as a client knows it: what the router has reported, whether the client reaches it, and its connection."""

from typing import TYPE_CHECKING, Final

import grpc.aio

from genserve.errors import GenserveError
from genserve.forward.upstream import TokenUpstream
from genserve.routing.replica import Load, Replica, ReplicaState
from genserve.transport.connection import Connection
from genserve.v1 import control_pb2, fleet_pb2, generation_pb2, types_pb2
from genserve.v1.control_pb2_grpc import ControlServiceStub
from genserve.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from genserve.v1.control_pb2_grpc import ControlServiceAsyncStub
    from genserve.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_STATES: Final = {
    fleet_pb2.REPLICA_STATE_CONNECTING: ReplicaState.CONNECTING,
    fleet_pb2.REPLICA_STATE_SYNCING: ReplicaState.SYNCING,
    fleet_pb2.REPLICA_STATE_READY: ReplicaState.READY,
    fleet_pb2.REPLICA_STATE_DRAINING: ReplicaState.DRAINING,
    fleet_pb2.REPLICA_STATE_UNHEALTHY: ReplicaState.UNHEALTHY,
}

_SERVES_NOBODY = (types_pb2.PHASE_STARTING, types_pb2.PHASE_DRAINING, types_pb2.PHASE_DEAD)


class KnownReplica:
    """A replica. `unreachable`: why this client does not even try to call it, "" = it does. `failure`: why its last try
    failed. `inflight`: sequences that this client has sent there and that have not ended."""

    def __init__(self, address: str, unreachable: str = "") -> None:
        self.address = address
        self.unreachable = unreachable
        self.failure = unreachable
        self.is_gone = False
        self.inflight = 0
        self.told = fleet_pb2.Replica(address=address)
        self.weight_version = 0
        self._reached = ""
        self._inflight_at_report = 0
        self._routed: Replica | None = None

    @property
    def instance_id(self) -> str:
        """Which run of the daemon the router has reached there; "" = none."""
        return self.told.engine.instance_id

    @property
    def is_told_ready(self) -> bool:
        """Whether it gets requests of the router."""
        return not self.is_gone and self.told.state == fleet_pb2.REPLICA_STATE_READY

    @property
    def is_reached(self) -> bool:
        """Whether this client has reached the same run of the daemon."""
        return self._reached != "" and self._reached == self.instance_id

    @property
    def where(self) -> tuple[ReplicaState, str]:
        """Its state for this client, and why it is not READY."""
        if self.is_gone:
            return ReplicaState.GONE, "it was removed"
        if not self.is_told_ready:
            return _STATES.get(self.told.state, ReplicaState.CONNECTING), self.told.reason
        if self.failure:
            return ReplicaState.UNHEALTHY, self.failure
        if not self.is_reached:
            return ReplicaState.CONNECTING, "this client has not reached it yet"
        return ReplicaState.READY, ""

    def tell(self, told: fleet_pb2.Replica, fleet_version: int) -> None:
        """The router has reported it."""
        if told.load != self.told.load:  # otherwise it is the report that is known
            self._inflight_at_report = self.inflight
        if told.engine.instance_id != self.instance_id:
            self.failure = self.unreachable
        self.told = told
        # A replica is READY only at the version of the fleet. The report of its engine may be older than its commit.
        self.weight_version = fleet_version if self.is_told_ready else told.engine.weight_version
        self._routed = None

    def reach(self, instance_id: str) -> None:
        """This run of the daemon has answered this client."""
        self._reached, self.failure, self._routed = instance_id, "", None

    def miss(self, failure: str) -> None:
        """It has not answered; "" = it is not known whether it does."""
        self._reached, self.failure, self._routed = "", failure, None

    def leave(self) -> None:
        """The router does not know it any more."""
        self.is_gone, self._routed = True, None

    def count(self, num_sequences: int) -> None:
        """So many sequences more were sent there, or fewer."""
        self.inflight += num_sequences
        self._routed = None

    def as_replica(self) -> Replica:
        """The replica as policies see it. Made anew only after a change."""
        if self._routed is None:
            told = self.told.load
            load = Load(told.running, told.waiting, told.kv_usage, told.tokens_per_second, self._inflight_at_report)
            self._routed = Replica(
                self.address,
                self.address,
                self.instance_id,
                self.where[0],
                self.weight_version,
                max(1, self.told.max_num_seqs),
                load,
                self.inflight,
            )
        return self._routed


class DirectUpstream(TokenUpstream):
    """Calls one replica with the credentials, the metadata and the options of the client's own connection, which ends
    this one as well."""

    def __init__(self, connection: Connection, known: KnownReplica) -> None:
        self.known = known
        self._connection = connection
        super().__init__(known.address, self._opened())

    def _opened(self) -> grpc.aio.Channel:
        self._certificate_number = self._connection.certificate_number
        return self._connection.another_channel(self.known.address, retries=False)  # another replica is tried instead

    def _use(self, channel: grpc.aio.Channel) -> None:
        super()._use(channel)
        self._control: ControlServiceAsyncStub = ControlServiceStub(channel)
        self._generation: GenerationServiceAsyncStub = GenerationServiceStub(channel)

    async def _renew(self) -> None:
        """The next connection is made with the certificates of now. One that carries calls is there."""
        if self._certificate_number != self._connection.certificate_number and not self.calls:
            old = self._channel
            self._use(self._opened())
            await old.close()

    @property
    def instance_id(self) -> str:
        """Which run of the daemon it is."""
        return self.known.instance_id

    @property
    def failure(self) -> str:
        """Why it is lost; "" = it was removed."""
        return self.known.where[1]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Those of the client, with its token."""
        return self._connection.metadata

    @property
    def least_version(self) -> int | None:
        """The version that it serves according to the router: it may have restarted since with another one."""
        return self.known.weight_version

    def check_open(self) -> None:
        """Raises ClientClosedError after the client was closed."""
        self._connection.check_open()

    async def reach(self, timeout_s: float) -> str:
        """Calls it. Returns what is wrong, "" if it is the daemon that the router has told of, and serves."""
        expected, version = self.known.instance_id, self.known.weight_version
        request = control_pb2.GetStatusRequest()
        try:
            await self._renew()
            with self.raising():
                answer = await self._control.GetStatus(request, timeout=timeout_s, metadata=self.metadata)
        except GenserveError as error:
            return f"this client does not reach it, but the router does: {error.message}"
        state = answer.state
        if state.instance_id != expected:
            return "another daemon answers this client at that address than the router: an address of another network?"
        if state.phase in _SERVES_NOBODY:
            return f"it says that it is {types_pb2.Phase.Name(state.phase).removeprefix('PHASE_').lower()}"
        if state.weight_version < version:
            return f"it serves version {state.weight_version}, the fleet {version}"
        self.known.reach(expected)
        return ""

    async def tokenize(
        self, request: generation_pb2.TokenizeRequest, timeout_s: float
    ) -> generation_pb2.TokenizeResponse:
        """Token ids of text or a chat. Raises GenserveError."""
        with self.raising():
            call = self._generation.Tokenize(request, timeout=timeout_s, metadata=self.metadata)
            with self.running(call):
                return await call
