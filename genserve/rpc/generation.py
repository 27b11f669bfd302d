"""GenerationService."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from genserve.control.admission import check_admission
from genserve.control.state import StateBoard
from genserve.engine.base import Engine
from genserve.rpc.convert import to_state
from genserve.rpc.convert_request import generation_request, tokenize_input
from genserve.rpc.convert_response import to_response
from genserve.rpc.generate_many import GenerateMany
from genserve.v1 import generation_pb2
from genserve.v1.generation_pb2_grpc import GenerationServiceServicer

if TYPE_CHECKING:
    from grpc.aio import ServicerContext


class GenerationServicer(GenerationServiceServicer):
    """Streams tokens out of the engine."""

    def __init__(self, engine: Engine, board: StateBoard) -> None:
        self._engine = engine
        self._board = board

    # A coroutine that writes, not an async generator: gRPC does not close those when the client cancels.
    async def Generate(  # type: ignore[override]  # the stubs know generators only
        self,
        request: generation_pb2.GenerateRequest,
        context: "ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]",
    ) -> None:
        """Writes deltas until the request has finished; ends the request when the client goes away."""
        check_admission(self._board.phase)
        stream = await self._engine.submit(generation_request(request, minted_id=uuid.uuid4().hex))
        try:
            # Admitted: from here on a client must not replay the call, and this is how it knows.
            await context.send_initial_metadata(())
            while (update := await stream.next()) is not None:
                await context.write(to_response(update, stream.request_id))
        finally:
            # Shielded, for a second cancellation would leave the request running.
            await asyncio.shield(stream.close())

    async def GenerateMany(  # type: ignore[override]  # the stubs know generators only
        self,
        request_iterator: AsyncIterator[generation_pb2.GenerateManyRequest],
        context: "ServicerContext[generation_pb2.GenerateManyRequest, generation_pb2.GenerateManyResponse]",
    ) -> None:
        """Writes deltas of all requests of the stream; ends them when the client goes away."""
        await context.send_initial_metadata(())
        await GenerateMany(self._engine, self._board, context.write).run(request_iterator)

    async def Abort(
        self, request: generation_pb2.AbortRequest, context: "ServicerContext[Any, Any]"
    ) -> generation_pb2.AbortResponse:
        """Ends requests of any client."""
        aborted_ids, unknown_ids = await self._engine.abort(None if request.all else list(request.request_ids))
        return generation_pb2.AbortResponse(
            aborted_ids=aborted_ids, unknown_ids=unknown_ids, state=to_state(self._board.state())
        )

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: "ServicerContext[Any, Any]"
    ) -> generation_pb2.TokenizeResponse:
        """Token ids of text or a chat."""
        adds_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        token_ids = await self._engine.tokenize(tokenize_input(request), adds_special_tokens)
        return generation_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=self._engine.info.max_model_len)

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: "ServicerContext[Any, Any]"
    ) -> generation_pb2.DetokenizeResponse:
        """Text of token ids."""
        text = await self._engine.detokenize(list(request.token_ids), request.skip_special_tokens)
        return generation_pb2.DetokenizeResponse(text=text)
