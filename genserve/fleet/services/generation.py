"""GenerationService of a router."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from genserve.errors import EngineDeadError, GenserveError, NoReplicaError, ReplicaLostError, UnavailableError
from genserve.fleet.fleet import Fleet
from genserve.fleet.services.callers import RemoteCaller, actions_of, parsed, read, remaining_s
from genserve.fleet.upstream import TOKENIZE_S, Upstream
from genserve.forward.caller import Forwarded, Waiting
from genserve.forward.destinations import ANY_REQUEST
from genserve.forward.generate import Generate
from genserve.forward.generate_many import GenerateMany
from genserve.forward.upstream import is_lost
from genserve.rpc.status import to_status
from genserve.rpc.streams.write_deadline import WriteDeadline
from genserve.v1 import generation_pb2

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

T = TypeVar("T")

_NO_RETRY: Final = ("grpc-retry-pushback-ms", "-1")
"""gRPC's own word for it: https://github.com/grpc/proposal/blob/master/A6-client-retries.md"""


class FleetGeneration:
    """Tokens from the replicas. Messages are bytes on both sides; these are coroutines that write, as those of a
    daemon."""

    def __init__(self, fleet: Fleet, deadline: WriteDeadline) -> None:
        self._fleet = fleet
        self._deadline = deadline
        self.waiting = Waiting()
        self._turn = 0

    async def Generate(self, request: bytes, context: "ServicerContext[bytes, bytes]") -> None:
        """Writes what one replica answers, or another one if that does not begin to."""
        forwarded, data = await parsed(generation_pb2.GenerateRequest, request, lambda each: _as_sent(each, request))
        caller = RemoteCaller(context, self._deadline)
        async with _waited_in_vain(context):
            await Generate(self._fleet, self.waiting, self._tokenize, caller).run(forwarded, data)

    async def GenerateMany(
        self, request_iterator: AsyncIterator[bytes], context: "ServicerContext[bytes, bytes]"
    ) -> None:
        """Writes what the replicas answer to the requests of a stream."""
        stream = GenerateMany(self._fleet, self.waiting, self._tokenize, RemoteCaller(context, self._deadline))
        await stream.run(actions_of(request_iterator))

    async def Abort(self, request: bytes, context: "ServicerContext[bytes, bytes]") -> bytes:
        """Ends requests on all replicas, and those that wait for one."""
        message = read(generation_pb2.AbortRequest, request)
        waited = self.waiting.abort(None if message.all else message.request_ids)
        timeout_s = _least(remaining_s(context))

        async def ask(upstream: Upstream) -> generation_pb2.AbortResponse | None:
            try:
                return await upstream.ask(upstream.abort, message, timeout_s)
            except (UnavailableError, EngineDeadError):
                return None  # and so are its requests

        asked = await asyncio.gather(*(ask(upstream) for upstream in self._fleet.answering))
        answers = [answer for answer in asked if answer is not None]
        aborted = dict.fromkeys([*waited, *(each for answer in answers for each in answer.aborted_ids)])
        unknown = dict.fromkeys(each for each in message.request_ids if each not in aborted)
        response = generation_pb2.AbortResponse(aborted_ids=aborted, unknown_ids=() if message.all else unknown)
        if answers:
            response.state.CopyFrom(answers[0].state)
        return response.SerializeToString()

    async def Tokenize(self, request: bytes, context: "ServicerContext[bytes, bytes]") -> bytes:
        """Token ids of text or a chat, from any replica."""
        message = read(generation_pb2.TokenizeRequest, request)
        async with _waited_in_vain(context):
            answer = await self._ask_any(lambda up: up.generation.Tokenize, message, remaining_s(context))
        return bytes(answer.SerializeToString())

    async def Detokenize(self, request: bytes, context: "ServicerContext[bytes, bytes]") -> bytes:
        """Text of token ids, from any replica."""
        message = read(generation_pb2.DetokenizeRequest, request)
        async with _waited_in_vain(context):
            answer = await self._ask_any(lambda up: up.generation.Detokenize, message, remaining_s(context))
        return bytes(answer.SerializeToString())

    async def _tokenize(self, request: generation_pb2.TokenizeRequest) -> generation_pb2.TokenizeResponse:
        return await self._ask_any(lambda up: up.generation.Tokenize, request, None)

    async def _ask_any(
        self, method: Callable[[Upstream], Callable[..., Awaitable[T]]], message: Message, limit_s: float | None
    ) -> T:
        """The answer of the next replica in turn, or of another one if that is lost."""
        until_s = time.monotonic() + _least(limit_s)
        ready = self._fleet.ready
        self._turn += 1
        in_turn = [ready[(self._turn + index) % len(ready)] for index in range(len(ready))]
        lost: GenserveError | None = None
        for upstream in in_turn or [await self._fleet.route(ANY_REQUEST, (), _least(limit_s))]:
            try:
                return await upstream.ask(method(upstream), message, max(0.0, until_s - time.monotonic()))
            except GenserveError as error:
                if not is_lost(error):
                    raise
                lost = error
        raise lost if lost is not None else UnavailableError("no replica answers")


def add_generation(server: grpc.aio.Server, servicer: FleetGeneration) -> None:
    """Adds the service, with messages that are bytes."""
    service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    kinds: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    handlers = {
        method.name: kinds[method.client_streaming, method.server_streaming](getattr(servicer, method.name))
        for method in service.methods
    }
    server.add_registered_method_handlers(service.full_name, handlers)


@asynccontextmanager
async def _waited_in_vain(context: "ServicerContext[bytes, bytes]") -> AsyncIterator[None]:
    """Has gRPC not try the call again when no replica has served it in time, or it was lost with too many: the caller's
    time would end without the reason, the wait begin anew, or more replicas be lost."""
    try:
        yield
    except (NoReplicaError, ReplicaLostError) as error:
        status = to_status(error)
        await context.abort(status.code, status.details, (*status.trailing_metadata, _NO_RETRY))


def _as_sent(message: generation_pb2.GenerateRequest, data: bytes) -> tuple[Forwarded, bytes]:
    forwarded = Forwarded(message)
    return forwarded, message.SerializeToString() if forwarded.was_minted else data


def _least(limit_s: float | None) -> float:
    return TOKENIZE_S if limit_s is None else min(limit_s, TOKENIZE_S)
