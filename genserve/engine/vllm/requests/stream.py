"""One admitted request: what its sequences have gained in vLLM's processing, read as strict deltas with exact weight
spans.

What is not read in time is merged, so a slow reader costs no memory but that of the outputs themselves.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError
from vllm.v1.engine.output_processor import RequestState

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
from genserve.engine.vllm.requests.logprobs import LogprobRows
from genserve.engine.vllm.requests.weight_spans import spans_between, version_of
from genserve.errors import GenserveError, InvalidFieldError

_PIECE_CHARACTERS = 4096
"""Above so many, new text is set aside: vLLM copies what it has for every token."""
_REASONS = {
    VllmFinishReason.LENGTH: FinishReason.LENGTH,
    VllmFinishReason.REPETITION: FinishReason.REPETITION,
}


class Requests(Protocol):
    """The requests of a client of the engine, of which a stream is one."""

    @property
    def is_dead(self) -> bool:
        """Whether the cause of the engine's death is known."""

    async def end(self, stream: "VllmStream") -> None:
        """Ends it in vLLM."""

    def forget(self, request_id: str) -> None:
        """It has ended, or its reader has gone."""

    def failure(self, error: Exception) -> Exception:
        """The error for a client, of what ended a stream that had begun."""

    def count_served(self, spans: Sequence[WeightSpan]) -> None:
        """Counts the tokens of a sequence that has ended."""


class VllmStream:
    """The reader's side of a request. `lora_version`: of its adapter, 0 = it has none."""

    def __init__(self, request: GenerationRequest, requests: Requests, lora_version: int = 0) -> None:
        self._request = request
        self._requests = requests
        self._lora_version = lora_version
        self._gained: list[StreamedSequence] = []  # with something new, which nobody has read
        self._on_gain: Callable[[], None] | None = None
        self._error: Exception | None = None  # what ended the request before its end
        self._num_tokens = 0  # read, of all sequences
        self._is_first = True
        self._expiry: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self.wanted = request.output
        """What updates contain."""
        self.reason_if_aborted = FinishReason.ABORTED
        """The finish reason if the engine aborts the request from now on."""
        self.num_unfinished = 0
        """Sequences that have not finished."""
        self.request_id = request.request_id
        """Its id."""
        self.internal_id = ""
        """vLLM's id of it."""
        self.is_finished = False
        """Whether nothing more will come."""

    def admitted(self, internal_id: str, reason_if_aborted: FinishReason) -> None:
        """vLLM has the request under this id: its time begins."""
        self.internal_id = internal_id
        self.reason_if_aborted = reason_if_aborted
        if (budget_s := self._request.stop.time_budget_s) is not None:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(budget_s, self.end_soon, FinishReason.TIME_LIMIT)

    def end_soon(self, reason: FinishReason) -> None:
        """Ends the request with `reason`. Tokens produced so far are still delivered."""
        if not self.is_finished and self._ending is None:
            self.reason_if_aborted = reason
            self._ending = asyncio.create_task(self._requests.end(self))

    @property
    def is_ending(self) -> bool:
        """Whether it has a reason of its own to end: it was asked to, or has ended in vLLM and was not read yet."""
        return self._ending is not None or not self.num_unfinished

    def abort(self) -> None:
        """Ends the request with reason ABORTED."""
        self.end_soon(FinishReason.ABORTED)

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when there is something to take, and at once if there is something now."""
        self._on_gain = callback
        held_back = self.wanted.stream_interval == 0 and self.num_unfinished > 0
        if self._error is not None or (self._gained and not held_back):
            callback()

    def gained(self, sequence: "StreamedSequence") -> None:
        """A sequence has something new to read, and had nothing before."""
        if self.is_finished:
            return
        sequence.is_noted = True
        self._gained.append(sequence)
        # Once: for the first sequence, or for the last one if all are read together.
        is_first = len(self._gained) == 1 if self.wanted.stream_interval else self.num_unfinished == 0
        if is_first and self._on_gain is not None:
            self._on_gain()

    def put(self, error: Exception) -> None:
        """vLLM's hook, for each sequence: the engine has failed."""
        if isinstance(error, VllmEngineDeadError) and not self._requests.is_dead:
            return  # it comes again with the cause, in a moment
        is_first, self._error = self._error is None, error
        if is_first and self._on_gain is not None:
            self._on_gain()

    # Once for each token, as `gained` and the hooks of StreamedSequence: every call in here is seen in the figures.
    def take(self) -> GenerationUpdate | None:
        """The available update, or None if there is none. After an error the request is over, here and in the
        engine."""
        if self.is_finished:
            return None
        try:
            if self._error is not None:
                raise self._error
            if not self._gained or (self.wanted.stream_interval == 0 and self.num_unfinished):
                return None
            gained, self._gained = self._gained, []
            if len(gained) > 1:
                gained.sort(key=lambda sequence: sequence.request_index)
            prompt = self._prompt(gained[0]) if self._is_first else None
            num_before, has_end = self._num_tokens, False
            deltas = []
            for sequence in gained:
                deltas.append(self._delta(sequence))
                has_end = has_end or sequence.finish is not None
            usage = self._end(gained, self._num_tokens - num_before) if has_end else None
            return GenerationUpdate(prompt, deltas, usage)
        except Exception as error:
            self.abandon()
            raise error if isinstance(error, GenserveError) else self._requests.failure(error) from error

    async def close(self) -> None:
        """Ends the request if it still runs."""
        if not self.is_finished:
            self.abandon()
        if self._ending is not None:
            await self._ending

    def abandon(self) -> None:
        """Ends the request; its reader gets nothing more."""
        if not self.is_finished:
            self._leave()
            if self._ending is None:
                self._ending = asyncio.create_task(self._requests.end(self))

    def _leave(self) -> None:
        self.is_finished = True
        if self._expiry is not None:
            self._expiry.cancel()
        self._on_gain = None
        self._gained.clear()  # a sequence refers to this object: nothing must wait for the garbage collector
        self._requests.forget(self.request_id)

    def _prompt(self, sequence: "StreamedSequence") -> PromptInfo:
        self._is_first = False
        return PromptInfo(
            num_tokens=sequence.prompt_len,
            num_cached_tokens=sequence.num_cached_tokens,
            token_ids=sequence.prompt_token_ids if self.wanted.prompt_token_ids else None,
            logprobs=None if sequence.rows is None else sequence.rows.take_prompt(),
        )

    def _delta(self, sequence: "StreamedSequence") -> SequenceDelta:
        sequence.is_noted = False
        token_ids, sequence.new_token_ids = sequence.new_token_ids, []
        start = sequence.num_taken
        end = sequence.num_taken = start + len(token_ids)
        self._num_tokens += len(token_ids)
        text = sequence.cut_text() if sequence.decodes else ""
        if sequence.texts:
            text = "".join([*sequence.texts, text])
            sequence.texts = []
        starts, lora_version = sequence.weight_version_starts, self._lora_version
        if starts and starts[-1][1] <= start < end:  # the common case: more tokens under the weights of the last one
            spans = [WeightSpan(version_of(starts[-1][0]), start, end, lora_version)]
        else:
            spans = spans_between(starts, start, end, lora_version)
        return SequenceDelta(
            sequence.request_index,
            token_ids if self.wanted.token_ids else (),
            text if self.wanted.text else "",
            None if sequence.rows is None else sequence.rows.take(),
            spans,
            None if sequence.finish is None else self._finish(sequence, *sequence.finish),
        )

    def _finish(
        self, sequence: "StreamedSequence", vllm_reason: VllmFinishReason, stop_reason: int | str | None
    ) -> Finish | None:
        if vllm_reason is VllmFinishReason.ERROR:
            return None
        spans = spans_between(sequence.weight_version_starts, 0, sequence.num_taken, self._lora_version)
        self._requests.count_served(spans)
        reason = self._reason(vllm_reason, stop_reason)
        return Finish(
            reason=reason,
            stop=stop_reason if reason in (FinishReason.STOP_STRING, FinishReason.STOP_TOKEN) else None,
            num_tokens=sequence.num_taken,
            weight_spans=spans,
            cumulative_logprob=None if sequence.rows is None else sequence.rows.cumulative_logprob,
        )

    def _reason(self, vllm_reason: VllmFinishReason, stop_reason: int | str | None) -> FinishReason:
        if vllm_reason is VllmFinishReason.STOP:
            if isinstance(stop_reason, str):
                return FinishReason.STOP_STRING
            # vLLM reports its one EOS token as None, and the others of generation_config as requested stop tokens.
            return FinishReason.STOP_TOKEN if stop_reason in self._request.stop.token_ids else FinishReason.EOS
        if vllm_reason is VllmFinishReason.ABORT:
            return self.reason_if_aborted
        if vllm_reason in _REASONS:
            return _REASONS[vllm_reason]
        raise GenserveError(f"the engine ended request {self.request_id} with {str(vllm_reason)!r}")

    def _end(self, gained: "list[StreamedSequence]", num_new: int) -> Usage | None:
        """The usage of the request if its last sequences have ended, else None."""
        if any(each.finish is not None and each.finish[0] is VllmFinishReason.ERROR for each in gained):
            # Produced tokens are delivered first; the next read raises the error.
            failure = self._engine_failure()
            if not num_new:
                raise failure
            self.put(failure)
            return None
        if self.num_unfinished:
            return None
        self._leave()
        return Usage(
            num_prompt_tokens=gained[0].prompt_len,
            num_cached_tokens=gained[0].num_cached_tokens,
            num_output_tokens=self._num_tokens,
        )

    def _engine_failure(self) -> GenserveError:
        if self._request.constraint is not None:
            return InvalidFieldError.of(
                "constraint", "the engine cannot enforce it: it does not compile, or contradicts other parameters"
            )
        return GenserveError(f"the engine ended request {self.request_id} with an error, which is in its log")


class StreamedSequence(RequestState):
    """vLLM's state of one sequence of a request, with what it has gained since it was read.

    internal: the methods that vLLM's processing calls, and the attributes that it reads.
    """

    detokenizer: Any
    logprobs_processor: Any
    queue: Any

    def __init__(self, made: RequestState, stream: VllmStream) -> None:
        """Has all of `made`, vLLM's own state, which has had no output."""
        self.__dict__.update(vars(made))
        wanted = stream.wanted
        self.stream = self.queue = stream
        self.streams = wanted.stream_interval > 0
        """Whether new tokens are read before the request has ended."""
        self.is_noted = False
        """Whether the stream knows that there is something to read."""
        self.new_token_ids: list[int] = []
        self.num_taken = 0
        """Tokens that were read."""
        self.finish: tuple[VllmFinishReason, int | str | None] | None = None
        """Why it has ended: vLLM's reason, and what stopped it."""
        self.rows: LogprobRows | None = None
        """Its log-probabilities, if some were asked for."""
        if wanted.logprobs is not None or wanted.prompt_logprobs is not None:
            self.rows = self.logprobs_processor = LogprobRows(wanted.logprobs, wanted.prompt_logprobs)
        self.texts: list[str] = []
        """New text that was set aside."""
        self._num_kept = 0
        self.decodes = isinstance(self.detokenizer, BaseIncrementalDetokenizer)
        """Whether its tokens become text: for the client, or to look for stop strings."""
        if self.decodes:
            # Of what was read, a stop string may begin in so many characters.
            self._num_kept = max(map(len, self.detokenizer.stop), default=0)
        else:
            self.detokenizer = _TokenCount()
        stream.num_unfinished += 1

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: object,
        finish_reason: VllmFinishReason | None,
        stop_reason: int | str | None,
        kv_transfer_params: object = None,
        ec_transfer_params: object = None,
        error: object = None,
    ) -> None:
        """vLLM's hook for each output. Returns nothing that vLLM would have to pass on."""
        self.new_token_ids += new_token_ids
        if finish_reason is not None:
            self.finish = finish_reason, stop_reason
            self.stream.num_unfinished -= 1
            if self.parent_req is not None:
                self.parent_req.child_requests.discard(self.request_id)
        elif self.decodes and len(self.detokenizer.output_text) > _PIECE_CHARACTERS:
            self.texts.append(self.cut_text())
        if not self.is_noted and (
            finish_reason is not None
            # New tokens are to be read before the sequence has ended: the first one at once.
            or (self.streams and (self.num_taken == 0 or len(self.new_token_ids) >= self.stream_interval))
        ):
            self.stream.gained(self)

    def cut_text(self) -> str:
        """Takes the new text of a sequence that decodes out of the detokenizer, and drops what was read there. It lags
        behind the tokens while a character or a stop string may be incomplete."""
        detokenizer = self.detokenizer
        text: str = detokenizer.get_next_output_text(self.finish is not None, True)
        num_read = detokenizer._last_output_text_offset
        num_dropped = min(num_read, len(detokenizer.output_text) - self._num_kept)
        if num_dropped > 0:
            detokenizer.output_text = detokenizer.output_text[num_dropped:]
            detokenizer._last_output_text_offset = num_read - num_dropped
        return text


class _TokenCount(IncrementalDetokenizer):
    """Of a sequence without text vLLM needs to know only how many tokens it has; it would keep them all."""

    def __init__(self) -> None:
        self._num_tokens = 0

    def num_output_tokens(self) -> int:
        """vLLM's hook."""
        return self._num_tokens

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> None:
        """vLLM's hook."""
        self._num_tokens += len(new_token_ids)
