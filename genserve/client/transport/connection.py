"""The connection to one daemon: its channel and stubs, deadlines, metadata and the translation of errors.

It does not know what the calls mean; `generation`, `weights` and `control` do.
"""

import asyncio
import os
import re
import reprlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, TypedDict, TypeVar

import grpc
import grpc.aio

from genserve.client.transport.errors import ClientClosedError, ClientMisuseError, error_of
from genserve.client.transport.fields import is_seconds
from genserve.client.transport.fork import forked_error, never_free_in_children
from genserve.client.transport.response_stream import ResponseStream
from genserve.client.transport.trace_metadata import trace_metadata
from genserve.errors import InvalidFieldError
from genserve.v1 import control_pb2_grpc, fleet_pb2_grpc, generation_pb2_grpc, weights_pb2_grpc

if TYPE_CHECKING:
    from genserve.v1.control_pb2_grpc import ControlServiceAsyncStub
    from genserve.v1.fleet_pb2_grpc import FleetServiceAsyncStub
    from genserve.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from genserve.v1.weights_pb2_grpc import WeightServiceAsyncStub

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
ResultT = TypeVar("ResultT")


class Unset(Enum):
    """Marks an argument that was not given, where None means something else."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET

Timeout = float | None | Unset
"""Limit of a call in seconds. None = no limit, which must be requested; UNSET = as in the client's Timeouts."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits, in seconds, of calls without a `timeout_s`. None = no limit."""

    control_s: float | None = 30.0
    """All calls except those below."""
    generate_s: float | None = 600.0
    """Generate, from the call to its last token."""
    push_s: float | None = 600.0
    """A weight push: all bytes, retries and applying together."""
    pause_slack_s: float = 10.0
    """Time that a pause gets on top of its `timeout_s`."""
    undo_slack_s: float = 60.0
    """Time that a call of vLLM's weight transfer gets on top of its `timeout_s`: a failed update is undone before the
    answer."""


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
    """Limits of calls without a `timeout_s`."""
    options: Sequence[tuple[str, str | int]]
    """Channel options of gRPC, which override those set here."""


_CHANNEL_OPTIONS: Final[tuple[tuple[str, str | int], ...]] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A daemon that restarts is found again within seconds; gRPC's own backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # gRPC servers close connections with pings faster than five minutes by default.
    ("grpc.keepalive_time_ms", 310_000),
    # Each client has its own connection, so that a push does not delay generation.
    ("grpc.use_local_subchannel_pool", 1),
    # Daemons are nearby: do not use a proxy that is meant for the web.
    ("grpc.enable_http_proxy", 0),
)


# Beyond this, some thirty years, gRPC's deadlines overflow into the past.
_FOREVER_S: Final = 1e9

_METADATA_KEY: Final = re.compile(r"[0-9a-z_.-]+")
_METADATA_VALUE: Final = re.compile(r"[ -~]*")


@dataclass(frozen=True, slots=True)
class _Opened:
    """A channel, its stubs, and the event loop that they are bound to."""

    loop: asyncio.AbstractEventLoop
    pid: int
    channel: grpc.aio.Channel
    generation: "GenerationServiceAsyncStub"
    weights: "WeightServiceAsyncStub"
    control: "ControlServiceAsyncStub"
    fleet: "FleetServiceAsyncStub"


class Connection:
    """One channel to one daemon, opened by the first call on the event loop that makes it.

    Every call takes its stub from here, and is refused here if it cannot work: after `close` with ClientClosedError; on
    another event loop, or in a process forked after gRPC was used, with ClientMisuseError.
    """

    # gRPC's threads do not survive a fork: calls in a child of a process that has used it would wait for ever.
    _grpc_pid: int | None = None

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
        self._metadata = tuple((key.lower(), value) for key, value in ({} if metadata is None else metadata).items())
        if token is not None:
            self._metadata += (("authorization", f"Bearer {token}"),)
        _check_sendable(target, self._metadata)
        self._credentials = grpc.ssl_channel_credentials() if tls and credentials is None else credentials
        self._options = tuple({**dict(_CHANNEL_OPTIONS), **dict(options)}.items())  # of two, gRPC takes the first
        self._closing: list[Callable[[], None]] = []
        self._further: weakref.WeakSet[grpc.aio.Channel] = weakref.WeakSet()
        self._opened: _Opened | None = None
        self._closed = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What to send with a call that begins now: the trace that its caller is in comes along."""
        return (*self._metadata, *trace_metadata())

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel, which is bound to the running event loop."""
        return self._open().channel

    @property
    def generation(self) -> "GenerationServiceAsyncStub":
        """Stub of GenerationService."""
        return self._open().generation

    @property
    def weights(self) -> "WeightServiceAsyncStub":
        """Stub of WeightService."""
        return self._open().weights

    @property
    def control(self) -> "ControlServiceAsyncStub":
        """Stub of ControlService."""
        return self._open().control

    @property
    def fleet(self) -> "FleetServiceAsyncStub":
        """Stub of FleetService, which a router has."""
        return self._open().fleet

    async def unary(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]",
        request: RequestT,
        timeout_s: Timeout = UNSET,
        *,
        wait_for_ready: bool = False,
    ) -> ResponseT:
        """Makes one call, within `timeout_s` or the time of control calls. `wait_for_ready` waits for a connection."""
        timeout = self.grpc_timeout_s(timeout_s, self.timeouts.control_s)
        with self.typed_errors():
            return await method(request, timeout=timeout, metadata=self.metadata, wait_for_ready=wait_for_ready)

    def stream(
        self,
        method: "grpc.aio.UnaryStreamMultiCallable[RequestT, ResponseT]",
        request: RequestT,
        timeout_s: float | None,
        convert: Callable[[ResponseT], ResultT],
    ) -> ResponseStream[ResultT]:
        """Starts a call that streams responses, each given to `convert`."""
        call = method(request, timeout=self.grpc_timeout_s(timeout_s, None), metadata=self.metadata)
        return ResponseStream(call, convert, self.typed_errors)

    @contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Turns a gRPC error into a typed one, and a call that `close` ended into ClientClosedError.

        The cancellation of the running task passes through.
        """
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.target) from error
        except grpc.aio.UsageError:
            self.check_open()  # the connection was closed between two steps of the call
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and (task is None or task.cancelling() == 0):
                raise self._closed_error() from None
            raise

    @staticmethod
    def grpc_timeout_s(timeout_s: Timeout, default_s: float | None) -> float | None:
        """A call's timeout in seconds, as gRPC takes it; None = none. Raises InvalidFieldError for an invalid time."""
        timeout = default_s if isinstance(timeout_s, Unset) else timeout_s
        if timeout is None:
            return None
        if not is_seconds(timeout):
            raise InvalidFieldError.of("timeout_s", f"{reprlib.repr(timeout)} is not a number of seconds")
        return None if timeout > _FOREVER_S else float(timeout)

    def check_open(self) -> None:
        """Raises ClientClosedError after `close`."""
        if self._closed:
            raise self._closed_error()

    def on_close(self, close: Callable[[], None]) -> None:
        """Registers a function to call when the connection is closed."""
        self._closing.append(close)

    def another_channel(self, target: str | None = None) -> grpc.aio.Channel:
        """Opens a further connection to the daemon, or to `target`. The caller or `close` closes it."""
        self._open()
        channel = self._new_channel(self.target if target is None else target)
        self._further.add(channel)
        return channel

    async def close(self) -> None:
        """Closes the channels; calls in progress raise ClientClosedError."""
        opened = self._opened
        if opened is not None and opened.pid != os.getpid():
            self._closed = True
            return  # they belong to the parent process
        is_usable = opened is not None and not opened.loop.is_closed()
        if opened is not None and is_usable and opened.loop is not asyncio.get_running_loop():
            raise ClientMisuseError("a client must be closed on the event loop that it was used on")
        self._closed = True
        if opened is not None and is_usable:
            for channel in (*self._further, opened.channel):
                await channel.close()
        while self._closing:
            self._closing.pop()()

    def _open(self) -> _Opened:
        opened = self._opened
        self.check_open()
        pid, loop = os.getpid(), asyncio.get_running_loop()
        if (opened is not None and opened.pid != pid) or Connection._grpc_pid not in (None, pid):
            raise forked_error()
        if opened is None:
            Connection._grpc_pid = pid
            channel = self._new_channel(self.target)
            opened = self._opened = _Opened(
                loop,
                pid,
                channel,
                generation_pb2_grpc.GenerationServiceStub(channel),
                weights_pb2_grpc.WeightServiceStub(channel),
                control_pb2_grpc.ControlServiceStub(channel),
                fleet_pb2_grpc.FleetServiceStub(channel),
            )
        elif opened.loop is not loop:
            raise ClientMisuseError(
                "the client belongs to the event loop of its first call, not to this one; make a client for each "
                "asyncio.run, or use the blocking Client, which has a loop of its own"
            )
        return opened

    def _new_channel(self, target: str) -> grpc.aio.Channel:
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(target, options=self._options)
        else:
            channel = grpc.aio.secure_channel(target, self._credentials, options=self._options)
        never_free_in_children(channel)
        return channel

    def _closed_error(self) -> ClientClosedError:
        return ClientClosedError(f"the client of {self.target} is closed")


class ServiceCalls:
    """Base of the classes that have the calls of one service."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection


def _check_sendable(target: str, metadata: Sequence[tuple[str, str]]) -> None:
    """Raises InvalidFieldError for an address or metadata that gRPC would refuse without naming it."""
    if not isinstance(target, str):
        raise InvalidFieldError.of("target", f"must be a text such as 127.0.0.1:50051, and not {type(target).__name__}")
    if target == "" or not target.isprintable():
        raise InvalidFieldError.of("target", f"{target!r} is not an address")
    if target.startswith(("http:", "https:")):
        raise InvalidFieldError.of("target", f"{target!r} is not an address of gRPC: write HOST:PORT")
    if ":" not in target:
        raise InvalidFieldError.of("target", f"{target!r} has no port: write HOST:PORT")
    for key, value in metadata:
        if not _METADATA_KEY.fullmatch(key):
            raise InvalidFieldError.of("metadata", f"{key!r} is not a valid gRPC metadata key")
        if not key.endswith("-bin") and not (isinstance(value, str) and _METADATA_VALUE.fullmatch(value)):
            field = "token" if key == "authorization" else f"metadata.{key}"  # the value must not be shown
            raise InvalidFieldError.of(field, "must be printable ASCII")
