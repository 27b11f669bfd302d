"""The connection of a client to one replica."""

from typing import TYPE_CHECKING

from genserve.client.direct.known_replica import KnownReplica
from genserve.errors import GenserveError
from genserve.forward.upstream import TokenUpstream
from genserve.transport.connection import Connection
from genserve.v1 import control_pb2, generation_pb2, types_pb2
from genserve.v1.control_pb2_grpc import ControlServiceStub
from genserve.v1.generation_pb2_grpc import GenerationServiceStub

if TYPE_CHECKING:
    from genserve.v1.control_pb2_grpc import ControlServiceAsyncStub
    from genserve.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_SERVES_NOBODY = (types_pb2.PHASE_STARTING, types_pb2.PHASE_DRAINING, types_pb2.PHASE_DEAD)


class DirectUpstream(TokenUpstream):
    """Calls one replica with the credentials, the metadata and the options of the client's own connection, which ends
    this one as well."""

    def __init__(self, connection: Connection, known: KnownReplica) -> None:
        channel = connection.another_channel(known.address, retries=False)  # another replica is tried instead
        super().__init__(known.address, channel)
        self.known = known
        self._connection = connection
        self._control: ControlServiceAsyncStub = ControlServiceStub(channel)
        self._generation: GenerationServiceAsyncStub = GenerationServiceStub(channel)

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
        """The version that it was told to serve: it may have restarted since with another one."""
        return self.known.weight_version

    def check_open(self) -> None:
        """Raises ClientClosedError after the client was closed."""
        self._connection.check_open()

    async def reach(self, timeout_s: float) -> str:
        """Calls it. Returns what is wrong, "" if it is the daemon that the router has told of, and serves."""
        expected, version = self.known.instance_id, self.known.weight_version
        request = control_pb2.GetStatusRequest()
        try:
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
            return await self._generation.Tokenize(request, timeout=timeout_s, metadata=self.metadata)
