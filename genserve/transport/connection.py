"""The connection to one daemon: its channel and stubs, deadlines, metadata and the translation of errors.

It does not know what the calls mean; `generation`, `weights` and `control` do. In a process that was forked from one
that used gRPC, a client gets an error, and the process ends cleanly.
"""

import asyncio
import ctypes
import os
import re
import reprlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
import grpc.aio

from genserve.aio import is_cancelled
from genserve.errors import InvalidFieldError
from genserve.net import is_port, port_of
from genserve.transport.errors import ClientClosedError, ClientMisuseError, error_of
from genserve.transport.fields import is_seconds
from genserve.transport.settings import reach
from genserve.transport.streams import ResponseStream
from genserve.transport.timeouts import SERVICE_CONFIG, Timeouts
from genserve.transport.trace_metadata import trace_metadata
from genserve.v1 import control_pb2_grpc, fleet_pb2_grpc, generation_pb2_grpc, weights_pb2_grpc

if TYPE_CHECKING:
    from genserve.v1.control_pb2_grpc import ControlServiceAsyncStub
    from genserve.v1.fleet_pb2_grpc import FleetServiceAsyncStub
    from genserve.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from genserve.v1.weights_pb2_grpc import WeightServiceAsyncStub


_channels: Final[weakref.WeakSet[grpc.aio.Channel]] = weakref.WeakSet()


def forked_error() -> ClientMisuseError:
    """The error of a client in a process that was forked from one that used gRPC."""
    return ClientMisuseError(
        "this process was forked from one that had used a client, and gRPC does not work across a fork: "
        "start the process with multiprocessing's method spawn, or make the first client after the fork"
    )


def never_free_in_children(channel: grpc.aio.Channel) -> None:
    """Keeps a channel alive in child processes. gRPC closes a freed channel with threads that a forked process does not
    have: a quarter of the children crashed when they ended. In a child the channel gets a reference that is never
    released, so that it outlives the interpreter."""
    _channels.add(channel)


def _keep_channels() -> None:
    for channel in list(_channels):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_keep_channels)


RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
ResultT = TypeVar("ResultT")


class Unset(Enum):
    """Marks an argument that was not given, where None means something else."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET

Timeout = float | None | Unset
"""Limit of a call in seconds. None = no limit, which must be requested; UNSET = as in the client's Timeouts."""


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
    ("grpc.service_config", SERVICE_CONFIG),
)
_NO_RETRIES: Final = ("grpc.service_config", "{}")


_MAX_RETIRED: Final = 3

# Beyond this, some thirty years, gRPC's deadlines overflow into the past.
_FOREVER_S: Final = 1e9

_METADATA_KEY: Final = re.compile(r"[0-9a-z_.-]+")
_METADATA_VALUE: Final = re.compile(r"[ -~]*")


@dataclass(frozen=True, slots=True)
class _Opened:
    """A channel, its stubs, and the event loop that they are bound to."""

    loop: asyncio.AbstractEventLoop
    pid: int
    certificate_number: int
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
        target: str | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
        timeouts: Timeouts | None = None,
        options: Sequence[tuple[str, str | int]] = (),
        **access: Any,
    ) -> None:
        """`access`: the rest of ConnectionSettings."""
        reached = reach(target, access)
        self.target = reached.target
        self.timeouts = Timeouts() if timeouts is None else timeouts
        self._caller = reached.caller
        self._metadata = tuple((key.lower(), value) for key, value in ({} if metadata is None else metadata).items())
        _check_sendable(self.target, self.metadata)
        self._options = tuple({**dict(_CHANNEL_OPTIONS), **dict(options)}.items())  # of two, gRPC takes the first
        self._closing: list[Callable[[], None]] = []
        self._further: weakref.WeakSet[grpc.aio.Channel] = weakref.WeakSet()
        self._retired: deque[grpc.aio.Channel] = deque()
        self._opened: _Opened | None = None
        self._closed = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with a call that begins now: also the token, and the trace that its caller is in."""
        return (*self._metadata, *self._caller.metadata, *trace_metadata())

    @property
    def certificate_number(self) -> int:
        """Which certificates a connection is made with that is opened now: a channel keeps those that it was made
        with."""
        return self._caller.certificate_number

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
    def typed_errors(self, target: str | None = None) -> Iterator[None]:
        """Turns a gRPC error into a typed one, and a call that `close` ended into ClientClosedError. `target`: what was
        called, for people, if it is not the daemon's own address.

        The cancellation of the running task passes through.
        """
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.target if target is None else target, self._caller) from error
        except grpc.aio.UsageError:
            self.check_open()  # the connection was closed between two steps of the call
            raise
        except asyncio.CancelledError:
            if self._closed and not is_cancelled():
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

    def another_channel(self, target: str | None = None, *, retries: bool = True) -> grpc.aio.Channel:
        """Opens a further connection to the daemon, or to `target`. The caller or `close` closes it. Without `retries`
        an error is told at once: for who knows another place to try."""
        self._open()
        channel = self._new_channel(self.target if target is None else target, retries=retries)
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
            for channel in (*self._further, *self._retired, opened.channel):
                await channel.close()
        while self._closing:
            self._closing.pop()()

    def _open(self) -> _Opened:
        opened = self._opened
        self.check_open()
        pid, loop = os.getpid(), asyncio.get_running_loop()
        if (opened is not None and opened.pid != pid) or Connection._grpc_pid not in (None, pid):
            raise forked_error()
        if opened is not None and opened.loop is not loop:
            raise ClientMisuseError(
                "the client belongs to the event loop of its first call, not to this one; make a client for each "
                "asyncio.run, or use the blocking Client, which has a loop of its own"
            )
        number = self.certificate_number
        if opened is None or opened.certificate_number != number:
            Connection._grpc_pid = pid
            channel = self._new_channel(self.target)
            if opened is not None:
                self._retire(opened.channel)
            opened = self._opened = _Opened(
                loop,
                pid,
                number,
                channel,
                generation_pb2_grpc.GenerationServiceStub(channel),
                weights_pb2_grpc.WeightServiceStub(channel),
                control_pb2_grpc.ControlServiceStub(channel),
                fleet_pb2_grpc.FleetServiceStub(channel),
            )
        return opened

    def _retire(self, channel: grpc.aio.Channel) -> None:
        """Its calls go on, and it ends with the client, or before if certificates change often."""
        self._retired.append(channel)
        if len(self._retired) > _MAX_RETIRED:
            self._ending = asyncio.ensure_future(self._retired.popleft().close())

    def _new_channel(self, target: str, *, retries: bool = True) -> grpc.aio.Channel:
        options = self._options if retries else tuple({**dict(self._options), **dict([_NO_RETRIES])}.items())
        try:
            channel = self._caller.aio_channel(target, options)
        except ValueError as error:
            raise InvalidFieldError.of("credentials", str(error)) from None
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
    if target == "" or not target.isprintable():
        raise InvalidFieldError.of("target", f"{target!r} is not an address")
    if target.startswith(("http:", "https:")):
        raise InvalidFieldError.of("target", f"{target!r} is not an address of gRPC: write HOST:PORT")
    if ":" not in target:
        raise InvalidFieldError.of("target", f"{target!r} has no port: write HOST:PORT")
    if target.count(":") > 1 and re.fullmatch(r"[0-9A-Fa-f:.]+(%\w+)?(:\d+)?", target):
        raise InvalidFieldError.of("target", f"{target!r} has an IPv6 address without brackets: write [ADDRESS]:PORT")
    if (port := port_of(target)) is not None and not is_port(port):
        raise InvalidFieldError.of("target", f"{target!r} has no port from 1 to 65535: write HOST:PORT")
    for key, value in metadata:
        if not _METADATA_KEY.fullmatch(key):
            raise InvalidFieldError.of("metadata", f"{key!r} is not a valid gRPC metadata key")
        if not key.endswith("-bin") and not (isinstance(value, str) and _METADATA_VALUE.fullmatch(value)):
            field = "token" if key == "authorization" else f"metadata.{key}"  # the value must not be shown
            raise InvalidFieldError.of(field, "must be printable ASCII")
