"""WeightService of a router: one push for all replicas."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc.aio

from genserve.errors import DeadlineError, InvalidFieldError, UnsupportedError
from genserve.fleet.push.pushes import FleetPushes
from genserve.fleet.router import Router
from genserve.fleet.services.callers import remaining_s
from genserve.fleet.upstream import DIGEST_S
from genserve.forward.upstream import frames_of
from genserve.v1 import weights_pb2
from genserve.v1.weights_pb2_grpc import WeightServiceServicer, add_WeightServiceServicer_to_server

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

HEADER_TIMEOUT_S: Final = 30.0
"""As of a daemon."""
_PULL_WRITE_TIMEOUT_S: Final = 60.0
_SERVICE: Final = weights_pb2.DESCRIPTOR.services_by_name["WeightService"].full_name


class FleetWeights(WeightServiceServicer):
    """Takes pushes for all replicas, and reads weights from one of them."""

    def __init__(self, router: Router, pushes: FleetPushes) -> None:
        self._router = router
        self._pushes = pushes

    async def PushWeights(  # type: ignore[override]  # frames as they come
        self, request_iterator: AsyncIterator[bytes], context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.PushWeightsResponse:
        """Takes one stream of a push."""
        frames = aiter(request_iterator)
        try:
            async with asyncio.timeout(HEADER_TIMEOUT_S):
                first = await anext(frames, None)
        except TimeoutError:
            raise DeadlineError(f"no header arrived within {HEADER_TIMEOUT_S:g} s") from None
        frame = weights_pb2.PushWeightsRequest.FromString(first) if first is not None else None
        if frame is None or frame.WhichOneof("frame") != "header":
            raise InvalidFieldError.of("frame", "the first one must be a header")
        answer = await self._pushes.take(frame.header, frames)
        answer.state.CopyFrom(self._router.state())
        return answer

    async def LoadWeights(
        self, request: weights_pb2.LoadWeightsRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.LoadWeightsResponse:
        """One replica fetches a version, and the others fetch it from there."""
        answer = await self._pushes.load(request)
        return weights_pb2.LoadWeightsResponse(push=answer.push, applied=_set(answer), state=self._router.state())

    async def GetPush(
        self, request: weights_pb2.GetPushRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.GetPushResponse:
        """How far a push has come."""
        answer = await self._pushes.report(request.push_id)
        answer.state.CopyFrom(self._router.state())
        return answer

    async def CommitPush(
        self, request: weights_pb2.CommitPushRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.CommitPushResponse:
        """Applies a push that is staged or prepared."""
        answer = await self._pushes.commit(request)
        answer.state.CopyFrom(self._router.state())
        return answer

    async def DiscardPush(
        self, request: weights_pb2.DiscardPushRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.DiscardPushResponse:
        """Frees what is staged."""
        answer = await self._pushes.discard(request)
        answer.state.CopyFrom(self._router.state())
        return answer

    async def GetWeights(
        self, request: weights_pb2.GetWeightsRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.GetWeightsResponse:
        """The weights of one replica: all serve the same."""
        upstream = self._router.any_replica()
        answer = await upstream.ask(upstream.weights.GetWeights, request, DIGEST_S)
        answer.state.CopyFrom(self._router.state())
        return answer

    async def PullWeights(  # type: ignore[override]  # frames as they come
        self, request: bytes, context: "ServicerContext[bytes, bytes]"
    ) -> None:
        """The bytes of the served version, or of a push, from one replica."""
        push_id = weights_pb2.PullWeightsRequest.FromString(request).push_id
        upstream = await self._pushes.replica_with(push_id) if push_id else self._router.any_replica()
        call = upstream.pull(request, timeout=remaining_s(context), metadata=upstream.metadata)
        with upstream.running(call):
            async for frame in frames_of(call, upstream):
                try:
                    async with asyncio.timeout(_PULL_WRITE_TIMEOUT_S):
                        await context.write(frame)
                except TimeoutError:
                    raise DeadlineError(f"the client did not read for {_PULL_WRITE_TIMEOUT_S:g} s") from None

    async def InitWeightTransfer(
        self, request: weights_pb2.InitWeightTransferRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.InitWeightTransferResponse:
        """Refused."""
        _refuse_transfer()

    async def StartWeightUpdate(
        self, request: weights_pb2.StartWeightUpdateRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.StartWeightUpdateResponse:
        """Refused."""
        _refuse_transfer()

    async def UpdateWeights(
        self, request: weights_pb2.UpdateWeightsRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.UpdateWeightsResponse:
        """Refused."""
        _refuse_transfer()

    async def FinishWeightUpdate(
        self, request: weights_pb2.FinishWeightUpdateRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.FinishWeightUpdateResponse:
        """Refused."""
        _refuse_transfer()


def add_weights(server: grpc.aio.Server, servicer: FleetWeights) -> None:
    """Adds the service, with frames that are not parsed: the handler that is registered last is used."""
    add_WeightServiceServicer_to_server(servicer, server)
    push: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(
        servicer.PushWeights, response_serializer=weights_pb2.PushWeightsResponse.SerializeToString
    )
    pull: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(servicer.PullWeights)
    server.add_registered_method_handlers(_SERVICE, {"PushWeights": push, "PullWeights": pull})


def _set(answer: weights_pb2.PushWeightsResponse) -> weights_pb2.Applied | None:
    return answer.applied if answer.HasField("applied") else None


def _refuse_transfer() -> NoReturn:
    raise UnsupportedError(
        "a router does not pass vLLM's weight transfer on: each replica has its own connection to the trainer, so call "
        "the replicas themselves, or push"
    )
