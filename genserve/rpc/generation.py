"""GenerationService."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from genserve.control.conditions import HasPhase, check_generation
from genserve.control.state import StateBoard
from genserve.control.waits import CanWait, late_because
from genserve.engine.protocol import Engine, GeneratingEngine
from genserve.errors import DeadlineError
from genserve.observe.log_lines import REQUEST_ID
from genserve.rpc.convert.generation_request import detokenize_input, generation_request, tokenize_input
from genserve.rpc.convert.generation_response import to_response
from genserve.rpc.convert.token_columns import Slots, first_slot
from genserve.rpc.convert.values import to_state
from genserve.rpc.received import Received
from genserve.rpc.streams.generate_many import GenerateMany
from genserve.rpc.streams.parts import MAX_PART_VALUES, num_values, parts_of
from genserve.rpc.streams.turns import FEW_CALLS, Turns
from genserve.rpc.streams.write_deadline import WriteDeadline, Writer
from genserve.v1 import generation_pb2
from genserve.v1.generation_pb2_grpc import GenerationServiceServicer
from genserve.wire.literals import FRONTEND_PORTS_KEY

if TYPE_CHECKING:
    from grpc.aio import ServicerContext


_BEFORE_S: Final = 0.5
"""The answer has to reach the client before its own deadline, also on a busy machine, and through a router."""
_SHARE: Final = 4
"""Of a short time the answer takes a quarter."""
_LONG_S: Final = 366 * 24 * 3600.0
"""A deadline beyond this is none."""


class EngineBoard(HasPhase, CanWait, Protocol):
    """The daemon's state board, or what a front end sees of it."""


Abort = Callable[[Sequence[str] | None], Awaitable[generation_pb2.AbortResponse]]
"""Ends requests of any client; None = all."""


def abort_with(engine: Engine, board: StateBoard) -> Abort:
    """Ends them in the engine, and answers with the state."""

    async def abort(request_ids: Sequence[str] | None) -> generation_pb2.AbortResponse:
        aborted_ids, unknown_ids = await engine.abort(request_ids)
        state = to_state(board.state())
        return generation_pb2.AbortResponse(aborted_ids=aborted_ids, unknown_ids=unknown_ids, state=state)

    return abort


def abort_elsewhere(ask: Callable[[Sequence[str] | None], Awaitable[bytes]]) -> Abort:
    """Has another process end them. `ask` returns its answer, serialized."""

    async def abort(request_ids: Sequence[str] | None) -> generation_pb2.AbortResponse:
        return generation_pb2.AbortResponse.FromString(await ask(request_ids))

    return abort


# The stubs know messages and generators only. These are coroutines that write, not async generators, because gRPC does
# not close generators when the client cancels.
class GenerationServicer(GenerationServiceServicer):
    """Streams tokens out of the engine."""

    def __init__(
        self,
        engine: GeneratingEngine,
        board: EngineBoard,
        abort: Abort,
        frontend_ports: Callable[[], Sequence[int]],
        deadline: WriteDeadline,
    ) -> None:
        """`frontend_ports`: of processes that clients should rather call."""
        self._engine = engine
        self._board = board
        self.turns = Turns(asyncio.get_running_loop())
        self._abort = abort
        self._frontend_ports = frontend_ports
        self._deadline = deadline

    async def Generate(  # type: ignore[override]
        self,
        request: Received[generation_pb2.GenerateRequest],
        context: "ServicerContext[Any, generation_pb2.GenerateResponse]",
    ) -> None:
        """Writes deltas, in turns with other calls, until the request has finished; ends the request when the client
        goes away, or does not read."""
        check_generation(self._board)
        info, minted_id = self._engine.info, uuid.uuid4().hex
        asked = await request.read(generation_request, info, minted_id)
        REQUEST_ID.set(asked.request_id)
        async with _last_look(self._board, context.time_remaining()):
            stream, turns = await self._engine.submit(asked), self.turns
            turns.num_calls += 1
            try:
                # Admitted: from here on a client must not replay the call, and these metadata tell it so.
                await context.send_initial_metadata(self._initial_metadata)
                may_write, is_first = asyncio.Semaphore(0), True
                stream.call_when_ready(may_write.release)
                with Writer(self._deadline) as writer:
                    while not stream.is_finished:
                        await may_write.acquire()
                        if turns.num_calls > FEW_CALLS and not is_first:
                            turns.enter(may_write)
                            await may_write.acquire()
                        if (update := stream.take()) is None:
                            continue
                        is_first = False
                        for part in (update,) if num_values(update) <= MAX_PART_VALUES else parts_of(update):
                            writer.num_looks = 0
                            await context.write(to_response(part, asked.request_id))
                            writer.num_looks = None
            finally:
                turns.num_calls -= 1
                # Shielded, because a second cancellation would leave the request running.
                await asyncio.shield(stream.close())

    async def GenerateMany(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[Received[generation_pb2.GenerateManyRequest]],
        context: "ServicerContext[Any, generation_pb2.GenerateManyResponse]",
    ) -> None:
        """Writes deltas of all requests of the stream; ends them when the client goes away, or does not read."""
        slots = Slots(first_slot(context.invocation_metadata() or ()))
        await context.send_initial_metadata(self._initial_metadata)
        write = partial(self._deadline.write, context.write)
        async with _last_look(self._board, context.time_remaining()):
            await GenerateMany(self._engine, self._board, write, slots).run(request_iterator)

    async def Abort(  # type: ignore[override]
        self, request: Received[generation_pb2.AbortRequest], context: "ServicerContext[Any, Any]"
    ) -> generation_pb2.AbortResponse:
        """Ends requests of any client."""
        return await self._abort(await request.read(lambda m: None if m.all else list(m.request_ids)))

    async def Tokenize(  # type: ignore[override]
        self, request: Received[generation_pb2.TokenizeRequest], context: "ServicerContext[Any, Any]"
    ) -> generation_pb2.TokenizeResponse:
        """Token ids of text or a chat."""
        token_ids = await self._engine.tokenize(*await request.read(tokenize_input))
        return generation_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=self._engine.info.max_model_len)

    async def Detokenize(  # type: ignore[override]
        self, request: Received[generation_pb2.DetokenizeRequest], context: "ServicerContext[Any, Any]"
    ) -> generation_pb2.DetokenizeResponse:
        """Text of token ids."""
        info = self._engine.info
        text = await self._engine.detokenize(*await request.read(detokenize_input, info))
        return generation_pb2.DetokenizeResponse(text=text)

    @property
    def _initial_metadata(self) -> tuple[tuple[str, str], ...]:
        ports = self._frontend_ports()
        return ((FRONTEND_PORTS_KEY, ",".join(map(str, ports))),) if ports else ()


@asynccontextmanager
async def _last_look(board: CanWait, remaining_s: float | None) -> AsyncIterator[None]:
    """Ends the block with DeadlineError a moment before `remaining_s` is over, if the engine generates nothing then.
    None = the call has no deadline.

    The client's own end of a call knows only that the time is over. The server's answer says who paused the engine, and
    travels as an error with details.
    """
    if remaining_s is None or remaining_s > _LONG_S:
        yield
        return
    late: DeadlineError | None = None
    rest_s = min(_BEFORE_S, remaining_s / _SHARE)

    def look() -> None:
        nonlocal late
        late = late_because(board, time.time(), rest_s)
        if late is not None:
            limit.reschedule(loop.time())

    loop = asyncio.get_running_loop()
    looking: asyncio.TimerHandle | None = None
    try:
        async with asyncio.timeout(None) as limit:
            looking = loop.call_later(remaining_s - rest_s, look)
            yield
    except TimeoutError:
        if late is None:
            raise
        raise late from None
    finally:
        if looking is not None:
            looking.cancel()
        late = None  # with its frames
