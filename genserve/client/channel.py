"""The connection to one daemon: its channel and stubs, deadlines, metadata and the translation of errors.

Knows nothing of what the calls mean; those are in generation.py, weights.py and control.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypedDict, TypeVar

import grpc
import grpc.aio

from genserve.client.errors import typed_errors
from genserve.client.stream import ResponseStream
from genserve.v1 import control_pb2_grpc, generation_pb2_grpc, weights_pb2_grpc

if TYPE_CHECKING:
    from genserve.v1.control_pb2_grpc import ControlServiceAsyncStub
    from genserve.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from genserve.v1.weights_pb2_grpc import WeightServiceAsyncStub

DEFAULT_TARGET: Final = "127.0.0.1:50051"

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
ResultT = TypeVar("ResultT")


class Unset(Enum):
    """Marks an argument that was not given, where None means something else."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET

Timeout = float | None | Unset
"""Deadline of a call in seconds; None = none at all, which has to be asked for; UNSET = as in the client's Timeouts."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines, in seconds, of calls that are given none of their own; None = no deadline."""

    control_s: float | None = 30.0
    """Everything that is neither of the others."""
    generate_s: float | None = 600.0
    """Generate, from the call to its last token."""
    push_s: float | None = 600.0
    """A weight push, all bytes, retries and applying together."""
    pause_slack_s: float = 10.0
    """What a pause gets above the time that it may take to take hold."""
    undo_slack_s: float = 60.0
    """What a call of vLLM's weight transfer gets above its time: a failed update is undone before it is answered."""


class ConnectionSettings(TypedDict, total=False):
    """How to reach the daemon; keyword arguments of `AsyncClient` and `Client`."""

    credentials: grpc.ChannelCredentials | None
    """TLS credentials, from `grpc.ssl_channel_credentials`; default: plaintext."""
    tls: bool
    """TLS with the system's root certificates."""
    token: str | None
    """Bearer token, sent with every call."""
    metadata: Mapping[str, str]
    """Further metadata, sent with every call."""
    timeouts: Timeouts
    """Deadlines of calls that are given none of their own."""
    options: Sequence[tuple[str, str | int]]
    """Channel options of gRPC; they win over those set here."""


_CHANNEL_OPTIONS: Final[tuple[tuple[str, str | int], ...]] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A daemon that restarts is found again within seconds; gRPC's own backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Pings faster than the five minutes that gRPC servers allow by default would cost the connection.
    ("grpc.keepalive_time_ms", 310_000),
    # Each client has a connection of its own, so that pushing does not stand in the way of generating.
    ("grpc.use_local_subchannel_pool", 1),
    # Daemons are neighbours: a proxy meant for the web is not asked for them.
    ("grpc.enable_http_proxy", 0),
)


class Connection:
    """One channel to one daemon, opened by the first call on the event loop that makes it."""

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        tls: bool = False,
        token: str | None = None,
        metadata: Mapping[str, str] | None = None,
        timeouts: Timeouts | None = None,
        options: Sequence[tuple[str, str | int]] = (),
    ) -> None:
        self.target = target
        self.timeouts = Timeouts() if timeouts is None else timeouts
        self.metadata = tuple((key.lower(), value) for key, value in ({} if metadata is None else metadata).items())
        if token is not None:
            self.metadata += (("authorization", f"Bearer {token}"),)
        self._credentials = grpc.ssl_channel_credentials() if tls and credentials is None else credentials
        self._options = (*_CHANNEL_OPTIONS, *options)
        self._closing: list[Callable[[], None]] = []

    @cached_property
    def channel(self) -> grpc.aio.Channel:
        """The channel; bound to the event loop that is running."""
        return self.another_channel()

    @cached_property
    def generation(self) -> "GenerationServiceAsyncStub":
        """Stub of GenerationService."""
        return generation_pb2_grpc.GenerationServiceStub(self.channel)

    @cached_property
    def weights(self) -> "WeightServiceAsyncStub":
        """Stub of WeightService."""
        return weights_pb2_grpc.WeightServiceStub(self.channel)

    @cached_property
    def control(self) -> "ControlServiceAsyncStub":
        """Stub of ControlService."""
        return control_pb2_grpc.ControlServiceStub(self.channel)

    async def unary(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]",
        request: RequestT,
        timeout_s: Timeout = UNSET,
        *,
        wait_for_ready: bool = False,
    ) -> ResponseT:
        """Makes one call; deadline: `timeout_s` or that of control calls. `wait_for_ready` waits for a connection."""
        timeout = self.timeouts.control_s if timeout_s is UNSET else timeout_s
        with typed_errors(self.target):
            return await method(request, timeout=timeout, metadata=self.metadata, wait_for_ready=wait_for_ready)

    def stream(
        self,
        method: "grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT]",
        request: RequestT,
        timeout_s: float | None,
        convert: Callable[[ResponseT], ResultT],
    ) -> ResponseStream[ResultT]:
        """Starts a call that streams responses, each given to `convert`."""
        call = method(request, timeout=timeout_s, metadata=self.metadata)
        return ResponseStream(call, convert, self.target)

    def on_close(self, close: Callable[[], None]) -> None:
        """Has `close` called when the connection is closed."""
        self._closing.append(close)

    def another_channel(self, target: str | None = None) -> grpc.aio.Channel:
        """A further connection to the daemon, or to `target`, to be closed by whoever asked."""
        target = self.target if target is None else target
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options=self._options)
        return grpc.aio.secure_channel(target, self._credentials, options=self._options)

    async def close(self) -> None:
        """Closes the channel; calls under way are cancelled."""
        if "channel" in self.__dict__:
            await self.channel.close()
        while self._closing:
            self._closing.pop()()


class ServiceCalls:
    """Base of the classes that have one service's calls each."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
