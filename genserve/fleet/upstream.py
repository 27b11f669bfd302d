"""The connections of a router to one replica, and how long it may take to answer."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from genserve.aio import silence
from genserve.errors import UnavailableError
from genserve.fleet.member import Member
from genserve.forward.upstream import TokenUpstream
from genserve.rpc.convert.control import DEFAULT_LOAD_TIMEOUT_S, DEFAULT_PAUSE_TIMEOUT_S
from genserve.security.caller import Caller, Options
from genserve.v1 import control_pb2, generation_pb2, weights_pb2
from genserve.v1.control_pb2_grpc import ControlServiceStub
from genserve.v1.generation_pb2_grpc import GenerationServiceStub
from genserve.v1.weights_pb2_grpc import WeightServiceStub
from genserve.weights.push.types import DEFAULT_APPLY_TIMEOUT_S, DEFAULT_PREPARED_TTL_S
from genserve.wire.literals import ROUTER_ID_KEY

if TYPE_CHECKING:
    from genserve.v1.control_pb2_grpc import ControlServiceAsyncStub
    from genserve.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from genserve.v1.weights_pb2_grpc import WeightServiceAsyncStub


# Every call to a replica ends, because a replica may be there and yet do nothing. Only streams of tokens and of status
# reports have no such limit: they end with the client's call, or when the watch finds that the replica is silent.
ASK_S: Final = 10.0
"""For what a daemon knows, or does at once."""
TOKENIZE_S: Final = 30.0
"""For a long prompt; and for an abort."""
DIGEST_S: Final = 630.0
"""For digests of all live weights, which take a daemon up to ten minutes."""
RESUME_S: Final = 60.0
RESET_S: Final = 60.0
WAKE_S: Final = 600.0
DISCARD_S: Final = 30.0
FETCH_S: Final = 6 * 3600.0
"""For a version: 2 TB at 100 MB/s. A bound only: a fetch that stands still ends by itself after its `staging_ttl`."""
_APPLY_SLACK_S: Final = 30.0


def apply_s(apply: weights_pb2.ApplyOptions) -> float:
    """How long a replica may take for a push that is applied or prepared."""
    return _seconds_or(apply.timeout, DEFAULT_APPLY_TIMEOUT_S) + _APPLY_SLACK_S


def pause_s(request: control_pb2.PauseRequest | control_pb2.SleepRequest) -> float:
    """How long a replica may take for a pause, or for a sleep, which pauses first."""
    return _seconds_or(request.timeout, DEFAULT_PAUSE_TIMEOUT_S) + ASK_S


def load_lora_s(request: control_pb2.LoadLoraRequest) -> float:
    """How long a replica may take for an adapter that is loaded from a directory."""
    return _seconds_or(request.timeout, DEFAULT_LOAD_TIMEOUT_S) + ASK_S


def prepared_ttl_s(header: weights_pb2.PushHeader) -> float:
    """How long a replica keeps what it has prepared."""
    return _seconds_or(header.prepared_ttl, DEFAULT_PREPARED_TTL_S)


def _seconds_or(duration: Duration, default_s: float) -> float:
    seconds = duration.ToNanoseconds() / 1e9
    return seconds if seconds > 0 else default_s


T = TypeVar("T")

_OPTIONS: Final = (
    # What is forwarded was bounded by the router as a server, or by the replica.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
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
_TOKENS: Final = (
    # So much waits here of each stream that its client does not read; gRPC's probe would make it megabytes. And so much
    # comes at once over the connection: 15 MB/s were measured with 10 ms to the replica and back.
    ("grpc.http2.lookahead_bytes", 256 << 10),
    ("grpc.http2.bdp_probe", 0),
)
_BYTES_OF_WEIGHTS: Final = (("grpc.http2.lookahead_bytes", 4 << 20), ("grpc.http2.max_frame_size", 4 << 20))
_WEIGHTS: Final = "/genserve.v1.WeightService/"


class Upstream(TokenUpstream):
    """Calls one replica. What is forwarded goes as bytes: `push` and `pull`, too, neither parse nor serialize.

    It has three connections: requests for tokens, bytes of weights, and all else, which waits behind neither of them:
    a daemon takes only so many calls on one connection.
    """

    def __init__(self, member: Member, replicas: Caller, router_id: str = "") -> None:
        """`replicas` calls it, for this run of a router. Raises UnavailableError."""
        self.member = member
        self.caller = replicas
        self._router = ((ROUTER_ID_KEY, router_id),) if router_id else ()
        self._certificate_number = replicas.certificate_number
        super().__init__(member.address, opened_channel(replicas, member.address, _TOKENS))
        self._open_others()

    def _use(self, channel: grpc.aio.Channel) -> None:
        super()._use(channel)
        self.generation: GenerationServiceAsyncStub = GenerationServiceStub(channel)

    def _open_others(self) -> None:
        self._control_channel = control = opened_channel(self.caller, self.address)
        self.control: ControlServiceAsyncStub = ControlServiceStub(control)
        self.weights: WeightServiceAsyncStub = WeightServiceStub(control)
        self.abort: grpc.aio.UnaryUnaryMultiCallable[generation_pb2.AbortRequest, generation_pb2.AbortResponse]
        self.abort = GenerationServiceStub(control).Abort
        self._weights_channel = weights = opened_channel(self.caller, self.address, _BYTES_OF_WEIGHTS)
        self.push: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = weights.stream_unary(f"{_WEIGHTS}PushWeights")
        self.pull: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = weights.unary_stream(f"{_WEIGHTS}PullWeights")

    @property
    def _channels(self) -> tuple[grpc.aio.Channel, ...]:
        return self._channel, self._control_channel, self._weights_channel

    async def renew(self) -> None:
        """To be called when the replica is lost: the next connections are made with the certificates of now. Raises
        UnavailableError if they cannot be used."""
        number = self.caller.certificate_number
        if number != self._certificate_number:
            old = self._channels
            self._use(opened_channel(self.caller, self.address, _TOKENS))
            self._open_others()
            self._certificate_number = number
            await _close(old)

    async def connect(self, timeout_s: float) -> None:
        """Returns when all connections are there: one that was refused a moment ago would refuse the first requests.
        Raises UnavailableError."""
        try:
            async with silence(timeout_s):
                await asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        except TimeoutError:
            raise UnavailableError(f"it has not taken all connections of this router for {timeout_s:g} s") from None

    async def close(self) -> None:
        """Ends the connections and all calls."""
        self.cut()
        await _close(self._channels)

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
        return (*self.caller.metadata, *self._router)

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


async def _close(channels: Iterable[grpc.aio.Channel]) -> None:
    for channel in channels:
        await channel.close()


def opened_channel(replicas: Caller, address: str, options: Options = ()) -> grpc.aio.Channel:
    """A channel to a replica. Raises UnavailableError if a file that it needs cannot be used."""
    try:
        return replicas.aio_channel(address, (*_OPTIONS, *options))
    except ValueError as error:
        raise UnavailableError(f"{address} cannot be called: {error}") from None
