"""One call of Generate: to the replica that is chosen, and to another one if that does not begin to answer."""

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from genserve.errors import GenserveError, NoReplicaError, ReplicaLostError
from genserve.fleet.fleet import Fleet
from genserve.fleet.forward.attempts import Attempts
from genserve.fleet.forward.forwarded import Forwarded, NumTokens, replica_lost
from genserve.fleet.forward.resume import Resumption, Tokenize
from genserve.fleet.forward.routed import parsed
from genserve.fleet.forward.waiting import AbortedWhileWaitingError, Waiting
from genserve.fleet.loss import is_lost
from genserve.fleet.upstream import Upstream, frames_of, until_ended
from genserve.v1 import generation_pb2

if TYPE_CHECKING:
    from grpc.aio import ServicerContext, UnaryStreamCall

UpstreamCall: TypeAlias = "UnaryStreamCall[bytes, bytes]"

_LONG_S: Final = 366 * 24 * 3600.0
"""A deadline beyond this is none."""


def remaining_s(context: "ServicerContext[Any, Any]") -> float | None:
    """The time until a call's deadline, None = it has none."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None or remaining > _LONG_S else max(0.0, remaining)


class Generate:
    """One call. `run` it once."""

    def __init__(
        self, fleet: Fleet, waiting: Waiting, tokenize: Tokenize, context: "ServicerContext[bytes, bytes]"
    ) -> None:
        self._fleet = fleet
        self._waiting = waiting
        self._tokenize = tokenize
        self._context = context
        self._data = b""
        self._refusal: tuple[GenserveError, UpstreamCall] | None = None
        self._is_admitted = False
        self._has_begun = False  # a message was delivered
        self._num_here = 0  # messages of the replica that it is sent to

    async def run(self, data: bytes) -> None:
        """Writes the answer as it comes. Raises the error to answer."""
        forwarded, self._data = await parsed(
            generation_pb2.GenerateRequest, data, lambda message: _as_sent(message, data)
        )
        attempts = Attempts(self._fleet, forwarded.request, remaining_s(self._context))
        num_tokens = NumTokens(forwarded.num_sequences)
        lost: ReplicaLostError | None = None
        try:
            while True:
                upstream = attempts.choose()
                if upstream is None:
                    upstream = await self._waiting.wait(forwarded.request_id, attempts.next(has_begun=self._has_begun))
                self._num_here = 0
                call = upstream.generate(self._data, timeout=remaining_s(self._context))
                try:
                    return await self._once(call, forwarded, upstream, num_tokens)
                except GenserveError as error:
                    self._refusal = error.with_traceback(None), call
                    if self._num_here == 0:
                        attempts.failed(error, upstream)
                        continue
                    if not is_lost(error):
                        raise
                    if forwarded.resumption is None:
                        raise replica_lost(upstream, num_tokens.count(), error) from None
                    if await self._is_over(forwarded.resumption, attempts, upstream, error):
                        return None
                    lost = replica_lost(upstream, forwarded.resumption.num_tokens, error)
        except NoReplicaError:
            if lost is None:
                raise
            raise lost from None
        except GenserveError as error:
            if self._refusal is not None and self._refusal[0] is error:
                await self._pass_on(self._refusal[1])
            raise
        except AbortedWhileWaitingError:
            await self._context.write(forwarded.aborted().SerializeToString())
        finally:
            attempts.end()
            self._refusal = None  # with its frames

    async def _once(self, call: UpstreamCall, forwarded: Forwarded, upstream: Upstream, num_tokens: NumTokens) -> None:
        """To one replica."""
        context, resumption = self._context, forwarded.resumption
        with upstream.running(call):
            with upstream.raising():
                await until_ended(call, call.initial_metadata())
            if not call.done():  # a refusal is a status, with no metadata before it
                if resumption is not None:
                    resumption.admitted()
                if not self._is_admitted:
                    self._is_admitted = True
                    # Not those of the replica: the ports of its front ends are not the router's.
                    await context.send_initial_metadata(())
            async for frame in frames_of(call, upstream):
                delivered = frame
                if resumption is not None:
                    response = generation_pb2.GenerateResponse.FromString(frame)
                    if resumption.take(response):
                        delivered = response.SerializeToString()
                num_tokens.note(delivered)
                await context.write(delivered)
                self._has_begun = True
                self._num_here += 1

    async def _pass_on(self, call: UpstreamCall) -> None:
        """Ends the call as the replica has ended it, with what this version does not know of the error as well."""
        metadata = tuple(await call.trailing_metadata() or ())
        await self._context.abort(await call.code(), await call.details() or "", metadata)

    async def _is_over(
        self, resumption: Resumption, attempts: Attempts, upstream: Upstream, error: GenserveError
    ) -> bool:
        """After a loss: makes what is missing the request that is sent, or ends the answer if nothing is."""
        if (end := resumption.over()) is not None:
            await self._context.write(end.SerializeToString())
            return True
        attempts.begin_again(upstream, resumption.num_tokens - resumption.num_before)
        try:
            rest = await resumption.rest(self._tokenize)
        except GenserveError as second:
            raise replica_lost(upstream, resumption.num_tokens, error, second) from None
        self._data = rest.SerializeToString()
        return False


def _as_sent(message: generation_pb2.GenerateRequest, data: bytes) -> tuple[Forwarded, bytes]:
    forwarded = Forwarded(message)
    return forwarded, message.SerializeToString() if forwarded.was_minted else data
