"""An engine whose next token follows from all tokens before it: whoever continues an answer wrongly says something
else."""

import asyncio
import zlib
from collections.abc import Callable, Sequence

from genserve.engine.generation import (
    Finish,
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    PromptInfo,
    SequenceDelta,
    TokenPrompt,
    Usage,
    WeightSpan,
)
from genserve.errors import WeightVersionMismatchError
from tests.support.scripted_daemon import GeneratingEngine

STEP_S = 0.003


def following(token_ids: Sequence[int]) -> int:
    """The token after these."""
    return zlib.crc32(repr(list(token_ids)).encode()) % 1000


def continued(prompt: Sequence[int], count: int) -> list[int]:
    """So many tokens after a prompt."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(following(token_ids))
    return token_ids[len(prompt) :]


class Made:
    """Counts the tokens that an engine has made."""

    def __init__(self) -> None:
        self.num_tokens = 0


class TalkingStream:
    """Gains a token a step, and merges what is not taken, as an engine's stream does."""

    def __init__(self, request: GenerationRequest, version: int, made: Made) -> None:
        assert isinstance(request.prompt, TokenPrompt) and request.stop.max_tokens is not None
        self.request_id = request.request_id
        self.is_finished = False
        self._version = version
        self._prompt = list(request.prompt.ids)
        self._output = continued(self._prompt, request.stop.max_tokens)
        self._made = 0
        self._made_by_engine = made
        self._taken = 0
        self._ready: Callable[[], None] = lambda: None
        self._talking = asyncio.create_task(self._talk())

    async def _talk(self) -> None:
        while self._made < len(self._output):
            await asyncio.sleep(STEP_S)
            self._made += 1
            self._made_by_engine.num_tokens += 1
            self._ready()

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        self._ready = callback
        if self._made > self._taken:  # nobody else says so if it has talked to its end
            callback()

    def take(self) -> GenerationUpdate | None:
        start, end, length = self._taken, self._made, len(self._prompt)
        if start == end:
            return None
        self._taken = end
        self.is_finished = end == len(self._output)
        whole = [WeightSpan(self._version, 0, end)]
        finish = Finish(FinishReason.LENGTH, None, end, whole, None) if self.is_finished else None
        span = WeightSpan(self._version, start, end)
        return GenerationUpdate(
            None if start else PromptInfo(length, 0, None, None),
            [SequenceDelta(0, self._output[start:end], "", None, [span], finish)],
            Usage(length, 0, end) if self.is_finished else None,
        )

    def abort(self) -> None:
        self._talking.cancel()

    async def close(self) -> None:
        self._talking.cancel()


def let_talk(engine: GeneratingEngine, version: int) -> Made:
    """Makes an engine talk, under a version of its own. Returns the count of its tokens."""
    made = Made()

    async def submit(request: GenerationRequest) -> TalkingStream:
        if request.min_weight_version is not None and request.min_weight_version > engine.weight_version:
            raise WeightVersionMismatchError(
                f"version {engine.weight_version} is served, the request needs {request.min_weight_version}"
            )
        engine.requests.append(request)
        return TalkingStream(request, version, made)

    engine.max_model_len = 4096
    engine.submit = submit  # type: ignore[method-assign, assignment]
    return made
