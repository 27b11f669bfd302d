"""The connection to one replica."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

import grpc.aio

from genserve.client.transport.errors import error_of
from genserve.errors import UnavailableError
from genserve.fleet.member import Member
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
_BROKEN_CODES: Final = ("CANCELLED", "INTERNAL", "UNKNOWN")
"""Of a status that no daemon has written: with these, too, gRPC ends the streams of a connection that breaks."""
_GENERATION: Final = "/genserve.v1.GenerationService/"
_WEIGHTS: Final = "/genserve.v1.WeightService/"


class Cancellable(Protocol):
    """A running call."""

    def cancel(self) -> bool:
        """Ends it."""


class Upstream:
    """Calls one replica. What is forwarded goes as bytes: `generate`, `generate_many`, `push` and `pull` neither parse
    nor serialize."""

    def __init__(self, member: Member) -> None:
        self.member = member
        channel = grpc.aio.insecure_channel(member.address, _OPTIONS)
        self._channel = channel
        self.control: ControlServiceAsyncStub = ControlServiceStub(channel)
        self.generation: GenerationServiceAsyncStub = GenerationServiceStub(channel)
        self.weights: WeightServiceAsyncStub = WeightServiceStub(channel)
        self.generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"{_GENERATION}Generate")
        self.generate_many: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"{_GENERATION}GenerateMany"
        )
        self.push: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"{_WEIGHTS}PushWeights")
        self.pull: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"{_WEIGHTS}PullWeights")
        self._calls: set[Cancellable] = set()

    @property
    def address(self) -> str:
        """Where the replica is."""
        return self.member.address

    async def ask(self, call: Callable[..., Awaitable[T]], request: Any, timeout_s: float) -> T:
        """The answer of a unary call. Raises its GenserveError, UnavailableError as soon as the replica is lost."""
        with self.raising():
            answer: Any = call(request, timeout=timeout_s)
            with self.running(answer):
                return cast(T, await answer)

    @contextmanager
    def running(self, call: Cancellable) -> Iterator[None]:
        """Ends the call with the block, or before if the replica is lost: `raising` says what is raised then."""
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)
            call.cancel()

    def cut(self) -> None:
        """Ends all running calls, because the replica is lost: a connection may take long to notice."""
        for call in tuple(self._calls):
            call.cancel()

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Turns the errors of calls into GenserveError; UnavailableError if the connection broke, `cut` has ended them,
        or the replica was removed before."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            known = error_of(error, self.address)
            if "reason" not in known.metadata and known.metadata.get("code") in _BROKEN_CODES:
                raise UnavailableError(f"the connection to {self.address} broke: {known.message}") from None
            raise known from None
        except grpc.aio.UsageError:
            raise self._lost() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._lost() from None

    def _lost(self) -> UnavailableError:
        return UnavailableError(f"replica {self.address} is lost: {self.member.failure or 'removed'}")

    async def close(self) -> None:
        """Ends the connection and all calls."""
        self.cut()
        await self._channel.close()


async def until_ended(call: "grpc.aio.Call", work: Awaitable[Any]) -> None:
    """Returns when the work is done, or the call has ended: where a call is cancelled before its metadata have crossed,
    gRPC leaves those waiting that wait for them. Raises what the work raises."""
    ended = asyncio.get_running_loop().create_future()
    call.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    working = asyncio.ensure_future(work)
    either: set[asyncio.Future[Any]] = {working, ended}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        ended.cancel()


async def frames_of(call: AsyncIterable[bytes], upstream: Upstream) -> AsyncIterator[bytes]:
    """The messages of a running call. Raises GenserveError."""
    with upstream.raising():
        async for frame in call:
            yield frame
