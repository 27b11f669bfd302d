"""The connection to one replica as a sender of requests for tokens needs it, and which errors say that it is lost."""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc.aio

from genserve.aio import is_cancelled
from genserve.errors import DeadlineError, DrainingError, EngineDeadError, GenserveError, UnavailableError
from genserve.transport.errors import error_of
from genserve.transport.trace_metadata import trace_metadata

if TYPE_CHECKING:
    from grpc.aio import StreamStreamCall, UnaryStreamCall

_BROKEN_CODES: Final = ("INTERNAL", "UNKNOWN")
"""Of a status that no daemon has written: with these, too, gRPC ends the streams of a connection that breaks."""
_GENERATION: Final = "/genserve.v1.GenerationService/"

log = logging.getLogger(__name__)
_GONE: Final = (UnavailableError, EngineDeadError)


class Cancellable(Protocol):
    """A running call."""

    def cancel(self) -> bool:
        """Ends it."""


class TokenUpstream:
    """Calls one replica. `generate` and `generate_many` take and give messages as bytes, which they neither parse nor
    serialize.

    `least_version`: replicas refuse requests that they would serve with older weights; None = they are not asked to.
    """

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        """`address` names the replica."""
        self.address = address
        self.calls: dict[Cancellable, None] = {}  # in order: those that began first are ended first
        self._use(channel)

    def _use(self, channel: grpc.aio.Channel) -> None:
        """Makes calls over this channel from now on."""
        self._channel = channel
        self._generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"{_GENERATION}Generate")
        self._generate_many: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"{_GENERATION}GenerateMany"
        )

    @property
    def instance_id(self) -> str:
        """Which run of the daemon it is; "" = not known."""
        raise NotImplementedError

    @property
    def failure(self) -> str:
        """Why it is lost, for people; "" = it was removed."""
        raise NotImplementedError

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        return ()

    @property
    def least_version(self) -> int | None:
        """The version that requests to it need at least, besides what they say themselves."""
        return None

    def check_open(self) -> None:
        """Raises the error of calls that have ended because the sender itself was closed, if it was."""

    def generate(self, data: bytes, timeout: float | None) -> "UnaryStreamCall[bytes, bytes]":
        """Begins a call of Generate."""
        return self._generate(data, timeout=timeout, metadata=(*self.metadata, *trace_metadata()))

    def generate_many(
        self, timeout: float | None, metadata: Sequence[tuple[str, str]] = ()
    ) -> "StreamStreamCall[bytes, bytes]":
        """Begins a call of GenerateMany."""
        return self._generate_many(timeout=timeout, metadata=(*self.metadata, *trace_metadata(), *metadata))

    @contextmanager
    def running(self, call: Cancellable) -> Iterator[None]:
        """Ends the call with the block, or before if the replica is lost: `raising` says what is raised then."""
        self.calls[call] = None
        try:
            yield
        finally:
            del self.calls[call]
            call.cancel()

    def cut(self) -> None:
        """Ends all running calls, because the replica is lost: a connection may take long to notice."""
        for call in tuple(self.calls):
            call.cancel()

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Turns the errors of calls into GenserveError; UnavailableError if the connection broke, `cut` has ended them,
        or the replica was removed before."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            self.check_open()
            known = error_of(error, self.address)
            if "reason" not in known.metadata and known.metadata.get("code") in _BROKEN_CODES:
                raise UnavailableError(f"the connection to {self.address} broke: {known.message}") from None
            raise known from None
        except grpc.aio.UsageError:
            self.check_open()
            raise self._lost() from None
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            self.check_open()
            raise self._lost() from None

    def _lost(self) -> UnavailableError:
        return UnavailableError(f"replica {self.address} is lost: {self.failure or 'removed'}")

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


async def frames_of(call: AsyncIterable[bytes], upstream: TokenUpstream) -> AsyncIterator[bytes]:
    """The messages of a running call. Raises GenserveError."""
    with upstream.raising():
        async for frame in call:
            yield frame


def is_lost(error: GenserveError) -> bool:
    """Whether the replica is gone, or about to go: what was asked of it is to be asked elsewhere."""
    return isinstance(error, (DrainingError, *_GONE))


def told(error: Exception) -> GenserveError:
    """The error, or one for what nobody foresaw, which the log explains."""
    if isinstance(error, GenserveError):
        return error
    log.error("a request could not be passed on", exc_info=error)
    return GenserveError(f"the request could not be passed on: {type(error).__name__}: {error}")


def may_have_done(error: GenserveError) -> bool:
    """Whether the replica may have done what it was asked, because it did not answer. One that is about to go has
    answered: with a refusal."""
    return isinstance(error, (DeadlineError, *_GONE))
