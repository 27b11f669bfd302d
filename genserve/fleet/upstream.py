"""The connection of a router to one replica."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import grpc.aio

from genserve.client.forward.upstream import TokenUpstream
from genserve.errors import UnavailableError
from genserve.fleet.member import Member
from genserve.rpc.router_calls import ROUTER_ID_KEY
from genserve.security.caller import Caller
from genserve.v1.control_pb2_grpc import ControlServiceStub
from genserve.v1.generation_pb2_grpc import GenerationServiceStub
from genserve.v1.weights_pb2_grpc import WeightServiceStub

if TYPE_CHECKING:
    from genserve.v1.control_pb2_grpc import ControlServiceAsyncStub
    from genserve.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from genserve.v1.weights_pb2_grpc import WeightServiceAsyncStub

T = TypeVar("T")

_OPTIONS: Final = (
    # What is forwarded was bounded by the router as a server, or by the replica.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    ("grpc.http2.max_frame_size", 4 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_http_proxy", 0),
    # The connection ends with the channel, and no other router in this process shares it.
    ("grpc.use_local_subchannel_pool", 1),
    # The watch decides when to call again: gRPC's own pauses grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
)
_WEIGHTS: Final = "/genserve.v1.WeightService/"


class Upstream(TokenUpstream):
    """Calls one replica. What is forwarded goes as bytes: `push` and `pull`, too, neither parse nor serialize."""

    def __init__(self, member: Member, replicas: Caller, router_id: str = "") -> None:
        """`replicas` calls it, for this run of a router. Raises UnavailableError."""
        self._router = ((ROUTER_ID_KEY, router_id),) if router_id else ()
        self._replicas = replicas
        self._certificate_number = replicas.certificate_number
        super().__init__(member.address, opened_channel(replicas, member.address))
        self.member = member

    def _use(self, channel: grpc.aio.Channel) -> None:
        super()._use(channel)
        self.control: ControlServiceAsyncStub = ControlServiceStub(channel)
        self.generation: GenerationServiceAsyncStub = GenerationServiceStub(channel)
        self.weights: WeightServiceAsyncStub = WeightServiceStub(channel)
        self.push: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"{_WEIGHTS}PushWeights")
        self.pull: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"{_WEIGHTS}PullWeights")

    async def renew(self) -> None:
        """To be called when the replica is lost: the next connection is made with the certificates of now. Raises
        UnavailableError if they cannot be used."""
        number = self._replicas.certificate_number
        if number != self._certificate_number:
            old = self._channel
            self._use(opened_channel(self._replicas, self.address))
            self._certificate_number = number
            await old.close()

    @property
    def instance_id(self) -> str:
        """Which run of the daemon it is; "" = not known."""
        return self.member.engine.instance_id if self.member.engine is not None else ""

    @property
    def failure(self) -> str:
        """Why it is lost; "" = it was removed."""
        return self.member.failure

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The token of the router, and which router it is."""
        return (*self._replicas.metadata, *self._router)

    @property
    def least_version(self) -> int | None:
        """The version that it is known to serve: it may have restarted with another one, and nobody has noticed yet."""
        return None if self.member.version is None else self.member.version.number

    async def ask(self, call: Callable[..., Awaitable[T]], request: Any, timeout_s: float) -> T:
        """The answer of a unary call. Raises its GenserveError, UnavailableError as soon as the replica is lost."""
        with self.raising():
            answer: Any = call(request, timeout=timeout_s, metadata=self.metadata)
            with self.running(answer):
                return cast(T, await answer)


def opened_channel(replicas: Caller, address: str) -> grpc.aio.Channel:
    """A channel to a replica. Raises UnavailableError if a file that it needs cannot be used."""
    try:
        return replicas.aio_channel(address, _OPTIONS)
    except ValueError as error:
        raise UnavailableError(f"{address} cannot be called: {error}") from None
