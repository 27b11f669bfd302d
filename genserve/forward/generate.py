"""One call of Generate: to the replica that is chosen, and to another one if that does not begin to answer."""

from typing import TYPE_CHECKING, Generic, TypeAlias

from genserve.errors import GenserveError
from genserve.forward.attempts import Attempts
from genserve.forward.caller import (
    AbortedWhileWaitingError,
    Caller,
    Forwarded,
    Loss,
    NumTokens,
    Waiting,
    in_generate,
    needed,
    replica_lost,
)
from genserve.forward.destinations import Destinations, UpstreamT
from genserve.forward.resume import Resumption, Tokenize
from genserve.forward.upstream import frames_of, is_lost, until_ended
from genserve.v1 import generation_pb2

if TYPE_CHECKING:
    from grpc.aio import UnaryStreamCall

UpstreamCall: TypeAlias = "UnaryStreamCall[bytes, bytes]"


class Generate(Generic[UpstreamT]):
    """One call. `run` it once."""

    def __init__(self, fleet: Destinations[UpstreamT], waiting: Waiting, tokenize: Tokenize, caller: Caller) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._tokenize = tokenize
        self._caller = caller
        self._data = b""
        self._refusal: tuple[GenserveError, UpstreamCall] | None = None
        self._unread: GenserveError | None = None  # the caller's fault, not the replica's
        self._is_admitted = False
        self._num_here = 0  # messages of the replica that it is sent to

    async def run(self, forwarded: Forwarded, data: bytes) -> None:
        """Writes the answer as it comes. `data`: the message to send for the request. Raises the error to answer."""
        self._data = data
        attempts = Attempts(self._fleet, forwarded.request, self._caller.remaining_s())
        num_tokens = NumTokens(forwarded.num_sequences)
        loss: Loss | None = None
        try:
            while True:
                upstream = attempts.choose()
                if upstream is None:
                    upstream = await self._waiting.wait(forwarded.request_id, attempts.next())
                self._num_here = 0
                message = in_generate(self._data, needed(forwarded, upstream))
                call = upstream.generate(message, self._caller.remaining_s())
                try:
                    return await self._once(call, forwarded, upstream, num_tokens)
                except GenserveError as error:
                    if error is self._unread:
                        raise
                    self._refusal = error.with_traceback(None), call
                    if self._num_here == 0:
                        attempts.failed(error, upstream)
                        continue
                    if not is_lost(error):
                        raise
                    if forwarded.resumption is None:
                        raise replica_lost(upstream, num_tokens.count(), error) from None
                    loss = Loss(upstream, forwarded.resumption.num_tokens, error)
                    if await self._is_over(forwarded.resumption, attempts, error, upstream):
                        return None
        except GenserveError as error:
            if loss is not None and self._num_here == 0 and error is not self._unread:
                raise loss.with_cause(error) from None
            if self._refusal is not None and self._refusal[0] is error:
                await self._caller.refused(self._refusal[1])
            raise
        except AbortedWhileWaitingError:
            await self._caller.write(forwarded.aborted().SerializeToString())
        finally:
            attempts.end()
            self._refusal = self._unread = None  # with their frames

    async def _once(self, call: UpstreamCall, forwarded: Forwarded, upstream: UpstreamT, num_tokens: NumTokens) -> None:
        """To one replica."""
        caller, resumption = self._caller, forwarded.resumption
        with upstream.running(call):
            with upstream.raising():
                await until_ended(call, call.initial_metadata())
            if not call.done():  # a refusal is a status, with no metadata before it
                if resumption is not None:
                    resumption.admitted()
                if not self._is_admitted:
                    self._is_admitted = True
                    await caller.admitted()
            async for frame in frames_of(call, upstream):
                delivered = frame
                if resumption is not None:
                    response = generation_pb2.GenerateResponse.FromString(frame)
                    if resumption.take(response):
                        delivered = response.SerializeToString()
                num_tokens.note(delivered)
                try:
                    await caller.write(delivered)
                except GenserveError as error:
                    self._unread = error
                    raise
                self._num_here += 1

    async def _is_over(
        self, resumption: Resumption, attempts: Attempts[UpstreamT], error: GenserveError, upstream: UpstreamT
    ) -> bool:
        """After a loss: makes what is missing the request that is sent, or ends the answer if nothing is."""
        if (end := resumption.over()) is not None:
            await self._caller.write(end.SerializeToString())
            return True
        self._num_here = 0
        num_tokens = resumption.num_tokens - resumption.num_before
        attempts.begin_again(error, upstream, num_tokens, resumption.last_version)
        rest = await self._waiting.wait(resumption.request_id, resumption.rest(self._tokenize))
        self._data = rest.SerializeToString()
        return False
