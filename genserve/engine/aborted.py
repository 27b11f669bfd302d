"""Requests that are aborted before the engine has them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from genserve.engine.generation import (
    Finish,
    FinishReason,
    GenerationRequest,
    GenerationUpdate,
    PromptInfo,
    SequenceDelta,
    TokenPrompt,
    Usage,
)
from genserve.wire.bounds import MAX_ABORTED_SEQUENCES

Stream = TypeVar("Stream")


class Admission:
    """A request from the moment when its id is taken until it has a stream."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._task: asyncio.Task[Any] | None = None
        self._is_aborted = False

    @property
    def is_aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._is_aborted

    def abort(self) -> None:
        """Ends it with reason ABORTED. Once `run` has returned, abort the stream instead."""
        if not self._is_aborted and self._task is not None:
            self._task.cancel()
        self._is_aborted = True

    async def run(self, admit: Callable[[], Awaitable[Stream]]) -> "Stream | AbortedStream":
        """Returns the stream of the admitted request, or an AbortedStream if `abort` came first. Call it once."""
        if self._is_aborted:
            return AbortedStream(self._request)
        self._task = task = asyncio.current_task()
        num_cancelling = 0 if task is None else task.cancelling()
        try:
            return await admit()
        except asyncio.CancelledError:
            # Another cancellation may have come as well, and must be raised.
            if task is not None and self.is_aborted and task.uncancel() <= num_cancelling:
                return AbortedStream(self._request)
            raise


class AbortedStream:
    """A GenerationStream with one update: every sequence is ABORTED, without a token. The length of a prompt that is
    not token ids is unknown and reported as 0."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self.request_id = request.request_id
        self.is_finished = False
        """Whether the update was taken."""

    def take(self) -> GenerationUpdate | None:
        """The update, once."""
        if self.is_finished:
            return None
        self.is_finished = True
        request, output = self._request, self._request.output
        ids = request.prompt.ids if isinstance(request.prompt, TokenPrompt) else ()
        logprob = None if output.logprobs is None else 0.0
        finish = Finish(FinishReason.ABORTED, None, 0, (), logprob)
        num_sequences = min(request.sampling.n or 1, MAX_ABORTED_SEQUENCES)
        return GenerationUpdate(
            PromptInfo(len(ids), 0, ids if output.prompt_token_ids else None, None),
            [SequenceDelta(index, (), "", None, (), finish) for index in range(num_sequences)],
            Usage(len(ids), 0, 0),
        )

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls `callback` at once, unless the update was taken."""
        if not self.is_finished:
            callback()

    def abort(self) -> None:
        """Does nothing: the request has ended already."""

    async def close(self) -> None:
        """Drops the update. Nothing has to be ended."""
        self.is_finished = True
