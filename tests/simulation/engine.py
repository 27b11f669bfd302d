"""An engine whose steps take time as the seed says, and whose tokens tell which bytes they came from."""

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from genserve.engine.generation import (
    Finish,
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    PromptInfo,
    SequenceDelta,
    Usage,
    WeightSpan,
)
from genserve.engine.types import Load
from tests.support.scripted_daemon import GeneratingEngine, ScriptedStream

if TYPE_CHECKING:
    from tests.simulation.replica import Replica

CONTENT_BYTES = 16


def bytes_of(content: int) -> bytes:
    """A tensor of the weights with this number."""
    return f"{content:0{CONTENT_BYTES}d}".encode()


class SimulatedEngine(GeneratingEngine):
    """A token of weights is their number, whatever version they are said to be. `base`: of the checkpoint."""

    def __init__(self, drawn: random.Random, replica: "Replica", base: int = 0) -> None:
        super().__init__()
        self._drawn = drawn
        self._replica = replica
        self._base = base
        self.max_loras = 4
        self.current_load = Load(0, 0, 0.0, 0.0, 0.0)

    @property
    def content(self) -> int:
        """The number of the live weights."""
        return int(bytes(self.live["a"])) if self.live else self._base

    async def step(self, step: str, call: str, timeout_s: float) -> None:
        drawn = self._drawn
        took_s = drawn.random() * 2 if drawn.random() < 0.05 else drawn.random() * 0.05
        await asyncio.sleep(took_s)
        await super().step(step, call, timeout_s)

    async def submit(self, request: GenerationRequest) -> ScriptedStream:
        stream = ScriptedStream(request.request_id)
        self._replica.process.start(self._talk(stream, request.stop.max_tokens or 4), "request")
        return stream

    async def abort(self, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        return [], list(request_ids or ())

    async def _talk(self, stream: ScriptedStream, num_tokens: int) -> None:
        spans: list[WeightSpan] = []
        for number in range(num_tokens):
            await asyncio.sleep(0.02 + self._drawn.random() * 0.3)
            while not self.running or self.asleep:
                await asyncio.sleep(0.05)
                if stream.closed.is_set():
                    return
            if stream.closed.is_set():
                return
            span = WeightSpan(self.weight_version, number, number + 1)
            spans.append(span)
            is_last = number == num_tokens - 1
            finish = Finish(FinishReason.LENGTH, None, num_tokens, spans, None) if is_last else None
            token = self._replica.emits(self.content)
            delta = SequenceDelta(0, [token], "", None, [span], finish)
            prompt = PromptInfo(2, 0, None, None) if number == 0 else None
            stream.put(GenerationUpdate(prompt, [delta], Usage(2, 0, num_tokens) if is_last else None))
