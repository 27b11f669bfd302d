"""What the sequences of a request gain, kept as columns until it is read.

internal: vLLM makes a RequestOutput and a CompletionOutput for each token of each request, keeps all tokens and
log-probabilities of a request until it ends, and copies its text for every token. `LeanOutputs` changes the states that
vLLM has just made of a request, before it has any output. Whatever else vLLM does with its outputs stays vLLM's.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from genserve.engine.generation import GenerationRequest
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.requests.logprobs import LogprobRows

_PIECE_CHARACTERS = 4096
"""Above so many, new text is set aside: vLLM copies what it has for every token."""


class Unread:
    """What one request has gained and nobody has read. Outputs that are not read in time are merged, so a slow reader
    costs no memory but that of the outputs themselves.

    Takes the place of vLLM's RequestOutputCollector in its states.
    """

    __slots__ = ("_closed", "_gained", "_liveness", "_on_gain", "_wanted", "error", "num_unfinished")

    def __init__(self, request: GenerationRequest, liveness: Liveness) -> None:
        self._wanted = request.output
        self._liveness = liveness
        self._gained: list[SequenceState] = []
        self._on_gain: Callable[[], None] | None = None
        self._closed = False
        self.error: Exception | None = None
        """What ended the request before its end."""
        self.num_unfinished = 0
        """Sequences that have not finished."""

    @property
    def is_ready(self) -> bool:
        """Whether there is something to take, or an error."""
        return self.error is not None or bool(self._gained and not self._holds_back)

    @property
    def _holds_back(self) -> bool:
        return self._wanted.stream_interval == 0 and self.num_unfinished > 0

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when there is something new, and at once if there is something."""
        self._on_gain = callback
        if self.is_ready:
            callback()

    def take(self) -> "list[SequenceState]":
        """The sequences with new output, in order, until they gain something again. Their output is to be taken."""
        if not self._gained or self._holds_back:
            return []
        gained, self._gained = self._gained, []
        if len(gained) > 1:
            gained.sort(key=lambda state: state.request_index)
        for state in gained:
            state.is_noted = False
        return gained

    def close(self) -> None:
        """Nobody will read any more."""
        self._closed = True
        self._on_gain = None
        self._gained.clear()  # a state refers to this object: what is dropped must not wait for the garbage collector

    def adopt(self, state: Any) -> None:
        """Makes vLLM's state of one of the sequences ours."""
        wanted = self._wanted
        state.__class__ = SequenceState
        state.unread = state.queue = self
        state.is_noted = False
        state.new_token_ids = []
        state.num_taken = 0
        state.finish = None
        state.streams = wanted.stream_interval > 0
        state.texts = []
        state.logprobs_processor = LogprobRows(wanted.logprobs, wanted.prompt_logprobs)
        if isinstance(state.detokenizer, BaseIncrementalDetokenizer):
            state.decodes = True
            # Of what was read, a stop string may begin in so many characters.
            state.num_kept = max(map(len, state.detokenizer.stop), default=0)
        else:
            state.decodes = False
            state.detokenizer = _TokenCount()
        self.num_unfinished += 1

    def note(self, state: "SequenceState") -> None:
        """A sequence has something new to read, and had nothing before."""
        if self._closed:
            return
        state.is_noted = True
        self._gained.append(state)
        # Once: for the first sequence, or for the last one if all are read together.
        is_first = len(self._gained) == 1 if self._wanted.stream_interval else self.num_unfinished == 0
        if is_first and self._on_gain is not None:
            self._on_gain()

    def put(self, error: Exception) -> None:
        """vLLM's hook, for each sequence: the engine has failed."""
        if isinstance(error, VllmEngineDeadError) and not self._liveness.dead:
            return  # it comes again with the cause, in a moment
        is_first, self.error = self.error is None, error
        if is_first and self._on_gain is not None:
            self._on_gain()


class SequenceState(RequestState):
    """vLLM's state of one sequence, with what it has gained since it was read."""

    unread: Unread
    is_noted: bool
    new_token_ids: list[int]
    num_taken: int
    """Tokens that were read."""
    finish: tuple[FinishReason, int | str | None] | None
    """Why it has ended: vLLM's reason, and what stopped it."""
    streams: bool
    """Whether new tokens are read before the request has ended."""
    texts: list[str]
    decodes: bool
    """Whether its tokens become text: for the client, or to look for stop strings."""
    num_kept: int

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: object,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        kv_transfer_params: object = None,
        ec_transfer_params: object = None,
        error: object = None,
    ) -> None:
        """vLLM's hook for each output. Returns nothing that vLLM would have to pass on."""
        self.new_token_ids += new_token_ids
        if finish_reason is not None:
            self._end(finish_reason, stop_reason)
        elif self.decodes and len(self.detokenizer.output_text) > _PIECE_CHARACTERS:
            self.texts.append(self._cut_text())
        if not self.is_noted and (finish_reason is not None or self._is_due()):
            self.unread.note(self)

    def _is_due(self) -> bool:
        """Whether new tokens are to be read before the sequence has ended: the first one at once."""
        if not self.streams:
            return False
        return self.num_taken == 0 or len(self.new_token_ids) >= self.stream_interval

    def _end(self, reason: FinishReason, stop: int | str | None) -> None:
        self.finish = reason, stop
        self.unread.num_unfinished -= 1
        if self.parent_req is not None:
            self.parent_req.child_requests.discard(self.request_id)

    def take_token_ids(self) -> list[int]:
        """The new tokens."""
        token_ids, self.new_token_ids = self.new_token_ids, []
        self.num_taken += len(token_ids)
        return token_ids

    def take_text(self) -> str:
        """The new text of a sequence that decodes. It lags behind the tokens while a character or a stop string may be
        incomplete."""
        text = self._cut_text()
        if self.texts:
            text = "".join([*self.texts, text])
            self.texts.clear()
        return text

    def _cut_text(self) -> str:
        """Takes new text from the detokenizer, and drops what was read there."""
        detokenizer = self.detokenizer
        text: str = detokenizer.get_next_output_text(self.finish is not None, True)
        num_read = detokenizer._last_output_text_offset
        num_dropped = min(num_read, len(detokenizer.output_text) - self.num_kept)
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


class LeanOutputs:
    """Adopts the states of requests that are expected, as soon as vLLM has made them."""

    def __init__(self, processor: OutputProcessor, liveness: Liveness) -> None:
        self._liveness = liveness
        self._states = processor.request_states
        self._add_request = processor.add_request
        self._expected: dict[str, Unread] = {}
        processor.add_request = self._added

    def expect(self, request: GenerationRequest) -> Unread:
        """The next request with its id will be this one."""
        unread = self._expected[request.request_id] = Unread(request, self._liveness)
        return unread

    def forget(self, request_id: str) -> None:
        """vLLM has the request, or will not have it."""
        self._expected.pop(request_id, None)

    def _added(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        self._add_request(request, *args, **kwargs)
        unread = self._expected.get(request.external_req_id or "")
        if unread is not None:
            unread.adopt(self._states[request.request_id])
