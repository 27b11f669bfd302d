"""One admitted request: vLLM's outputs as strict deltas with exact weight spans."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from vllm.v1.engine import FinishReason as VllmFinishReason

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
from genserve.engine.vllm.requests.outputs import SequenceState, Unread
from genserve.engine.vllm.requests.weight_spans import spans_between
from genserve.errors import GenserveError, InvalidFieldError

_REASONS = {
    VllmFinishReason.LENGTH: FinishReason.LENGTH,
    VllmFinishReason.REPETITION: FinishReason.REPETITION,
}


class VllmStream:
    """Reads what vLLM's states of the request's sequences have gained, which are merged until they are read.

    `internal_id` is vLLM's id of the request.
    """

    def __init__(
        self,
        request: GenerationRequest,
        internal_id: str,
        unread: Unread,
        abort: Callable[["VllmStream"], Coroutine[Any, Any, None]],
        on_closed: Callable[[str], None],
        translated: Callable[[Exception], Exception],
        on_served: Callable[[Sequence[WeightSpan]], None],
    ) -> None:
        self._request = request
        self._wanted = request.output
        self._unread = unread
        self._abort = abort
        self._on_closed = on_closed
        self._translated = translated
        self._on_served = on_served
        self._num_tokens = 0  # of all sequences
        self._first = True
        self._finished = False
        self._abort_reason = FinishReason.ABORTED
        self._expiry: asyncio.TimerHandle | None = None
        self._aborting: asyncio.Task[None] | None = None
        self.internal_id = internal_id
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

    def abort(self) -> None:
        """Ends the request with reason ABORTED."""
        self.end_soon(FinishReason.ABORTED)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self._finished

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when there is something to take, and at once if there is something now."""
        self._unread.call_when_ready(callback)

    def take(self) -> GenerationUpdate | None:
        """The available update, or None if there is none. After an error the request is over, here and in the
        engine."""
        if self._finished:
            return None
        try:
            if self._unread.error is not None:
                raise self._unread.error
            gained = self._unread.take()
            return self._update(gained) if gained else None
        except Exception as error:
            self.abandon()
            raise error if isinstance(error, GenserveError) else self._translated(error) from error

    # Once for each token: every call in here is seen in the figures.
    def _update(self, gained: list[SequenceState]) -> GenerationUpdate:
        prompt = None
        if self._first:
            prompt = self._prompt(gained[0])
            self._first = False
        num_before = self._num_tokens
        deltas = []
        has_end = False
        for state in gained:
            deltas.append(self._delta(state))
            has_end = has_end or state.finish is not None
        usage = self._end(gained, self._num_tokens - num_before) if has_end else None
        return GenerationUpdate(prompt, deltas, usage)

    def _end(self, gained: list[SequenceState], num_new: int) -> Usage | None:
        """What the end of some sequences means for the request: its usage, if these were the last ones."""
        if any(state.finish is not None and state.finish[0] is VllmFinishReason.ERROR for state in gained):
            # Produced tokens are delivered first; the next read raises the error.
            failure = self._engine_failure()
            if not num_new:
                raise failure
            self._unread.put(failure)
            return None
        if self._unread.num_unfinished:
            return None
        self._leave()
        return Usage(
            num_prompt_tokens=gained[0].prompt_len,
            num_cached_tokens=gained[0].num_cached_tokens,
            num_output_tokens=self._num_tokens,
        )

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
        self._unread.close()
        self._on_closed(self.request_id)

    def _prompt(self, state: SequenceState) -> PromptInfo:
        return PromptInfo(
            num_tokens=state.prompt_len,
            num_cached_tokens=state.num_cached_tokens,
            token_ids=state.prompt_token_ids if self._wanted.prompt_token_ids else None,
            logprobs=state.logprobs_processor.take_prompt(),
        )

    def _delta(self, state: SequenceState) -> SequenceDelta:
        start = state.num_taken
        token_ids = state.take_token_ids()
        end = state.num_taken
        self._num_tokens += end - start
        text = state.take_text() if state.decodes else ""
        starts = state.weight_version_starts
        return SequenceDelta(
            state.request_index,
            token_ids if self._wanted.token_ids else (),
            text if self._wanted.text else "",
            state.logprobs_processor.take(),
            spans_between(starts, start, end),
            None if state.finish is None else self._finish(state, spans_between(starts, 0, end), end),
        )

    def _finish(self, state: SequenceState, spans: list[WeightSpan], num_tokens: int) -> Finish | None:
        assert state.finish is not None
        vllm_reason, stop_reason = state.finish
        if vllm_reason is VllmFinishReason.ERROR:
            return None
        self._on_served(spans)
        reason = self._reason(vllm_reason, stop_reason)
        return Finish(
            reason=reason,
            stop=stop_reason if reason in (FinishReason.STOP_STRING, FinishReason.STOP_TOKEN) else None,
            num_tokens=num_tokens,
            weight_spans=spans,
            cumulative_logprob=state.logprobs_processor.cumulative_logprob,
        )

    def _reason(self, vllm_reason: VllmFinishReason, stop_reason: int | str | None) -> FinishReason:
        if vllm_reason is VllmFinishReason.STOP:
            if isinstance(stop_reason, str):
                return FinishReason.STOP_STRING
            # vLLM reports its one EOS token as None, and the others of generation_config as requested stop tokens.
            return FinishReason.STOP_TOKEN if stop_reason in self._request.stop.token_ids else FinishReason.EOS
        if vllm_reason is VllmFinishReason.ABORT:
            return self._abort_reason
        if vllm_reason in _REASONS:
            return _REASONS[vllm_reason]
        raise GenserveError(f"the engine ended request {self.request_id} with {str(vllm_reason)!r}")

    def _engine_failure(self) -> GenserveError:
        if self._request.constraint is not None:
            return InvalidFieldError.of(
                "constraint", "the engine cannot enforce it: it does not compile, or contradicts other parameters"
            )
        return GenserveError(f"the engine ended request {self.request_id} with an error, which is in its log")
