"""One admitted request: vLLM's outputs as strict deltas with exact weight spans."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

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
from genserve.engine.vllm.requests.logprobs import columns
from genserve.engine.vllm.requests.weight_spans import spans_between
from genserve.errors import GenserveError, InvalidFieldError

_REASONS = {"length": FinishReason.LENGTH, "repetition": FinishReason.REPETITION}


class _Callback:
    """Replaces an asyncio.Event that is set when there is an output: one wake-up serves many streams."""

    __slots__ = ("set",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.set = callback

    def clear(self) -> None:
        """The method of an event."""


class VllmStream:
    """Reads vLLM's RequestOutputCollector, which merges outputs that are not read in time: a slow reader costs no
    memory.

    `states` are vLLM's RequestState objects by sequence index: they hold the live starts of the weight spans.
    """

    def __init__(
        self,
        request: GenerationRequest,
        collector: Any,
        states: Mapping[int, Any],
        abort: Callable[["VllmStream"], Coroutine[Any, Any, None]],
        on_closed: Callable[[str], None],
        translated: Callable[[Exception], GenserveError],
    ) -> None:
        self._request = request
        self._states = states
        self._abort = abort
        self._on_closed = on_closed
        self._translated = translated
        self._num_tokens: dict[int, int] = {}
        self._first = True
        self._finished = False
        self._failure: GenserveError | None = None
        self._abort_reason = FinishReason.ABORTED
        self._expiry: asyncio.TimerHandle | None = None
        self._aborting: asyncio.Task[None] | None = None
        self.collector = collector
        """vLLM's queue of this request's outputs; its request_id is vLLM's internal one."""
        if request.stop.time_budget_s is not None:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(request.stop.time_budget_s, self.end_soon, FinishReason.TIME_LIMIT)

    @property
    def request_id(self) -> str:
        """Its id."""
        return self._request.request_id

    def reason_if_aborted(self, reason: FinishReason) -> None:
        """Sets the finish reason for the case that the engine aborts the request from now on."""
        self._abort_reason = reason

    def end_soon(self, reason: FinishReason) -> None:
        """Ends the request with `reason`. Tokens produced so far are still delivered."""
        if not self._finished and self._aborting is None:
            self._abort_reason = reason
            self._aborting = asyncio.create_task(self._abort(self))

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self._finished

    async def next(self) -> GenerationUpdate | None:
        """The next update, or None after the last."""
        while not self._finished:
            update = self.take()
            if update is not None:
                return update
            await self.collector.ready.wait()
        return None

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls `callback` instead of waking a waiting `next`."""
        self.collector.ready = _Callback(callback)  # internal: the collector's asyncio.Event
        if self.collector.output is not None:
            callback()

    def take(self) -> GenerationUpdate | None:
        """The available update, or None if there is none. After an error the request is over, here and in the
        engine."""
        if self._finished:
            return None
        try:
            if self._failure is not None:
                raise self._failure
            output = self.collector.get_nowait()
            return None if output is None else self._update(output)
        except Exception as error:
            self.abandon()
            raise error if isinstance(error, GenserveError) else self._translated(error) from error

    def _update(self, output: Any) -> GenerationUpdate | None:
        failed = any(completion.finish_reason == "error" for completion in output.outputs)
        if failed:
            # Produced tokens are delivered first; the next read raises the error.
            self._failure = self._engine_failure()
            if not any(completion.token_ids for completion in output.outputs):
                raise self._failure
        prompt = self._prompt(output) if self._first else None
        self._first = False
        deltas = [self._delta(completion) for completion in output.outputs]
        usage = None
        if failed:
            self.collector.ready.set()
        elif output.finished:
            self._leave()
            usage = Usage(
                num_prompt_tokens=len(output.prompt_token_ids),
                num_cached_tokens=output.num_cached_tokens or 0,
                num_output_tokens=sum(self._num_tokens.values()),
            )
        return GenerationUpdate(prompt, deltas, usage)

    async def close(self) -> None:
        """Ends the request if it still runs."""
        if not self._finished:
            self.abandon()
        if self._aborting is not None:
            await self._aborting

    def abandon(self) -> None:
        """Ends the request; its reader gets nothing more."""
        if not self._finished:
            self._leave()
            if self._aborting is None:
                self._aborting = asyncio.create_task(self._abort(self))

    def _leave(self) -> None:
        self._finished = True
        if self._expiry is not None:
            self._expiry.cancel()
        self.collector.close()
        self._on_closed(self.request_id)

    def _prompt(self, output: Any) -> PromptInfo:
        wanted = self._request.output
        logprobs = output.prompt_logprobs
        return PromptInfo(
            num_tokens=len(output.prompt_token_ids),
            num_cached_tokens=output.num_cached_tokens or 0,
            token_ids=output.prompt_token_ids if wanted.prompt_token_ids else None,
            logprobs=columns(logprobs, wanted.prompt_logprobs)
            if wanted.prompt_logprobs is not None and logprobs
            else None,
        )

    def _delta(self, completion: Any) -> SequenceDelta:
        wanted = self._request.output
        index = completion.index
        start = self._num_tokens.get(index, 0)
        end = start + len(completion.token_ids)
        self._num_tokens[index] = end
        starts = self._starts(completion)
        logprobs = completion.logprobs
        return SequenceDelta(
            index=index,
            token_ids=completion.token_ids if wanted.token_ids else (),
            text=completion.text if wanted.text else "",
            logprobs=columns(logprobs, wanted.logprobs) if wanted.logprobs is not None and logprobs else None,
            weight_spans=spans_between(starts, start, end),
            finish=self._finish(completion, spans_between(starts, 0, end), end)
            if completion.finish_reason and completion.finish_reason != "error"
            else None,
        )

    def _starts(self, completion: Any) -> list[tuple[str, int]]:
        state = self._states.get(completion.index)
        if state is not None:
            return state.weight_version_starts  # type: ignore[no-any-return]
        # The request finished before its state could be looked up: the final output has the spans.
        return [(span.version, span.start) for span in completion.weight_versions or ()]

    def _finish(self, completion: Any, spans: list[WeightSpan], num_tokens: int) -> Finish:
        reason = self._reason(completion.finish_reason, completion.stop_reason)
        return Finish(
            reason=reason,
            stop=completion.stop_reason if reason in (FinishReason.STOP_STRING, FinishReason.STOP_TOKEN) else None,
            num_tokens=num_tokens,
            weight_spans=spans,
            cumulative_logprob=completion.cumulative_logprob if self._request.output.logprobs is not None else None,
        )

    def _reason(self, vllm_reason: str, stop_reason: int | str | None) -> FinishReason:
        if vllm_reason == "stop":
            if isinstance(stop_reason, str):
                return FinishReason.STOP_STRING
            # vLLM reports its one EOS token as None, and the others of generation_config as requested stop tokens.
            return FinishReason.STOP_TOKEN if stop_reason in self._request.stop.token_ids else FinishReason.EOS
        if vllm_reason == "abort":
            return self._abort_reason
        if vllm_reason in _REASONS:
            return _REASONS[vllm_reason]
        raise GenserveError(f"the engine ended request {self.request_id} with {vllm_reason!r}")

    def _engine_failure(self) -> GenserveError:
        if self._request.constraint is not None:
            return InvalidFieldError.of(
                "constraint", "the engine cannot enforce it: it does not compile, or contradicts other parameters"
            )
        return GenserveError(f"the engine ended request {self.request_id} with an error, which is in its log")
