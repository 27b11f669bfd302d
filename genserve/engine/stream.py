"""One admitted request: vLLM's outputs as strict deltas with exact weight spans."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from genserve.engine.columns import columns
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
from genserve.engine.spans import spans_between
from genserve.errors import GenserveError

_REASONS = {"length": FinishReason.LENGTH, "repetition": FinishReason.REPETITION}


class _Callback:
    """In the place of an asyncio.Event that is set when there is an output: one wake-up serves many streams."""

    __slots__ = ("set",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.set = callback

    def clear(self) -> None:
        """As an event's."""


class VllmStream:
    """Reads vLLM's RequestOutputCollector, which merges what is not read in time: a slow reader costs no memory.

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
        """What to call the end if the engine aborts the request from now on."""
        self._abort_reason = reason

    def end_soon(self, reason: FinishReason) -> None:
        """Ends the request with `reason`; what was produced is still delivered."""
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
        """Has `callback` called instead of waking who waits in `next`."""
        self.collector.ready = _Callback(callback)  # internal: the collector's asyncio.Event
        if self.collector.output is not None:
            callback()

    def take(self) -> GenerationUpdate | None:
        """What has come, or None when nothing has."""
        if self._finished:
            return None
        try:
            output = self.collector.get_nowait()
        except Exception as error:
            self._leave()
            raise self._translated(error) from error
        if output is None:
            return None
        prompt = self._prompt(output) if self._first else None
        self._first = False
        deltas = [self._delta(completion) for completion in output.outputs]
        usage = None
        if output.finished:
            self._leave()
            usage = Usage(
                num_prompt_tokens=len(output.prompt_token_ids),
                num_cached_tokens=output.num_cached_tokens or 0,
                num_output_tokens=sum(self._num_tokens.values()),
            )
        return GenerationUpdate(prompt, deltas, usage)

    async def close(self) -> None:
        """Ends the request if it still runs."""
        if self._finished:
            return
        self._leave()
        await self._abort(self)

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
            finish=self._finish(completion, spans_between(starts, 0, end), end) if completion.finish_reason else None,
        )

    def _starts(self, completion: Any) -> list[tuple[str, int]]:
        state = self._states.get(completion.index)
        if state is not None:
            return state.weight_version_starts  # type: ignore[no-any-return]
        # Finished before its state could be looked up: the final output has the spans.
        return [(span.version, span.start) for span in completion.weight_versions or ()]

    def _finish(self, completion: Any, spans: list[WeightSpan], num_tokens: int) -> Finish:
        return Finish(
            reason=self._reason(completion.finish_reason, completion.stop_reason),
            stop=completion.stop_reason,
            num_tokens=num_tokens,
            weight_spans=spans,
            cumulative_logprob=completion.cumulative_logprob if self._request.output.logprobs is not None else None,
        )

    def _reason(self, vllm_reason: str, stop_reason: int | str | None) -> FinishReason:
        if vllm_reason == "stop":
            if stop_reason is None:
                return FinishReason.EOS
            return FinishReason.STOP_STRING if isinstance(stop_reason, str) else FinishReason.STOP_TOKEN
        if vllm_reason == "abort":
            return self._abort_reason
        if vllm_reason in _REASONS:
            return _REASONS[vllm_reason]
        raise GenserveError(f"the engine ended request {self.request_id} with {vllm_reason!r}")
