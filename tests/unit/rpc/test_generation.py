"""When a call of Generate writes what its request has gained."""

import asyncio
from collections.abc import Callable
from typing import Any

from genserve.control.state import StateBoard
from genserve.engine.generation import GenerationRequest, GenerationUpdate, SequenceDelta, Usage
from genserve.rpc.generation import GenerationServicer
from genserve.rpc.received import Received
from genserve.rpc.streams.turns import FEW_CALLS
from genserve.rpc.streams.write_deadline import WriteDeadline
from genserve.v1 import generation_pb2
from tests.support.patience import turns
from tests.support.scripted_engine import ScriptedEngine


class Stream:
    """A stream that gains a token when the test says so."""

    request_id = "r"
    is_finished = False

    def __init__(self) -> None:
        self.updates: list[GenerationUpdate] = []
        self.on_gain: Callable[[], None] = lambda: None

    def gain(self, token_id: int, usage: Usage | None = None) -> None:
        self.updates.append(GenerationUpdate(None, [SequenceDelta(0, [token_id], "", None, (), None)], usage))
        self.on_gain()

    def take(self) -> GenerationUpdate | None:
        if not self.updates:
            return None
        update = self.updates.pop(0)
        self.is_finished = update.usage is not None
        return update

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        self.on_gain = callback
        if self.updates:
            callback()

    async def close(self) -> None:
        """Nothing runs."""


class Engine(ScriptedEngine):
    """Admits every request to one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream()

    async def submit(self, request: GenerationRequest) -> Any:  # type: ignore[override]
        return self.stream


class Context:
    """What a call of Generate uses of gRPC's."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []

    def time_remaining(self) -> None:
        """It has no deadline."""

    async def send_initial_metadata(self, metadata: object) -> None:
        """Nobody reads them."""

    async def write(self, response: generation_pb2.GenerateResponse) -> None:
        self.written.append(list(response.outputs[0].token_ids))


class Turns:
    """Turns that come when the test says so, of so many other calls."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls = num_calls
        self.waiting: list[asyncio.Semaphore] = []

    def enter(self, may_write: asyncio.Semaphore) -> None:
        self.waiting.append(may_write)


def generating(engine: Engine, context: Context, of_all: Turns) -> asyncio.Task[None]:
    """A call of Generate that runs."""
    board: Any = StateBoard(None, lambda: (), "i")
    abort: Any = None
    servicer = GenerationServicer(engine, board, abort, tuple, WriteDeadline(0.0))  # type: ignore[arg-type]
    servicer.turns = of_all  # type: ignore[assignment]
    data = generation_pb2.GenerateRequest(text="x").SerializeToString()
    received = Received(generation_pb2.GenerateRequest, 1 << 20, data)
    return asyncio.create_task(servicer.Generate(received, context))  # type: ignore[arg-type]


async def test_first_tokens_wait_for_no_turn() -> None:
    """All others do where there are many calls, whoever writes and however long."""
    engine, context, of_all = Engine(), Context(), Turns(num_calls=FEW_CALLS)
    calling = generating(engine, context, of_all)
    await turns()
    engine.stream.gain(1)
    await turns()
    assert context.written == [[1]] and of_all.waiting == []
    engine.stream.gain(2, Usage(1, 0, 2))
    await turns()
    assert context.written == [[1]] and len(of_all.waiting) == 1
    of_all.waiting[0].release()
    await calling
    assert context.written == [[1], [2]]
    assert of_all.num_calls == FEW_CALLS


async def test_few_calls_write_at_once() -> None:
    """Their messages take no time from which others would gain."""
    engine, context, of_all = Engine(), Context(), Turns(num_calls=FEW_CALLS - 1)
    calling = generating(engine, context, of_all)
    await turns()
    for token_id in (1, 2):
        engine.stream.gain(token_id)
        await turns()
        assert context.written[-1] == [token_id]
    engine.stream.gain(3, Usage(1, 0, 3))
    await calling
    assert of_all.waiting == [] and of_all.num_calls == FEW_CALLS - 1
