"""A request that goes on elsewhere when its replica is lost: from its prompt and the tokens that were delivered.

The answers of the second replica are changed to look as if they came from the first: the places of tokens and versions
in the sequence, their number, and the facts about the prompt.
"""

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from genserve.errors import GenserveError, InvalidFieldError
from genserve.v1 import generation_pb2, types_pb2
from genserve.wire.conversions import duration_of, seconds_of

Tokenize = Callable[[generation_pb2.TokenizeRequest], Awaitable[generation_pb2.TokenizeResponse]]

_PENALTIES: Final = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""The penalties, and the values that are none."""
_LEAST_BUDGET_S: Final = 0.001
"""A time budget must be above 0."""
_NO_SEED: Final = -1
"""For vLLM this is none."""


def check_resume(message: generation_pb2.GenerateRequest) -> None:
    """Raises InvalidFieldError if a request with `resume` could not go on elsewhere as if nothing had happened."""
    if (forbidden := _forbidding(message)) is not None:
        raise InvalidFieldError.of("resume", f"is not possible with {forbidden}")


def _forbidding(message: generation_pb2.GenerateRequest) -> str | None:
    """The field that does not go with `resume`."""
    sampling, output = message.sampling, message.output
    if sampling.n > 1:
        return f"sampling.n = {sampling.n}"
    if output.text or not output.HasField("text"):
        return "output.text, which is true unless it is set to false"
    if output.HasField("token_ids") and not output.token_ids:
        return "output.token_ids = false"
    if (constraint := message.WhichOneof("constraint")) is not None:
        return constraint
    given = {field.name: value for field, value in sampling.ListFields()}
    for name, none in _PENALTIES.items():
        if given.get(name, none) != none:
            return f"sampling.{name}"
    fields = {"sampling.bad_words": sampling.bad_words, "stop.strings": message.stop.strings}
    for name, values in fields.items():
        if values:
            return name
    return "engine_params" if message.engine_params.fields else None


class Resumption:
    """One request with `resume`. Every response to it goes through `take`; after a loss, `rest` is what is sent on."""

    def __init__(self, message: generation_pb2.GenerateRequest) -> None:
        """`message`: as it was sent, with its id. It is kept."""
        self._message = message
        self._admitted_s = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._token_ids: list[int] = []
        self._spans: list[types_pb2.WeightSpan] = []
        self._logprob = 0.0
        self._has_begun = False
        self._has_output = False
        self._is_second = False
        self._spans_before: list[types_pb2.WeightSpan] = []
        self._logprob_before = 0.0
        self._offset = 0

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._message.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens that were delivered."""
        return len(self._token_ids)

    @property
    def last_version(self) -> int:
        """The version that sampled the last token that was delivered."""
        return self._spans[-1].version if self._spans else 0

    @property
    def num_before(self) -> int:
        """Tokens that were delivered before the last loss."""
        return self._offset

    def admitted(self) -> None:
        """A replica has admitted the request: with the first one its time budget begins."""
        if not self._has_begun:
            self._admitted_s = time.monotonic()

    def take(self, response: generation_pb2.GenerateResponse) -> bool:
        """Notes what a response delivers, and makes it a part of the whole answer. Returns whether that changed it."""
        if self._is_second:
            self._continue(response)
        elif response.HasField("prompt"):
            self._num_prompt_tokens = response.prompt.num_tokens
            self._num_cached_tokens = response.prompt.num_cached_tokens
        self._has_begun = True
        self._has_output = self._has_output or bool(response.outputs)
        for delta in response.outputs:
            self._token_ids.extend(delta.token_ids)
            self._spans = _joined([*self._spans, *delta.weight_spans])
            self._logprob += sum(delta.logprobs.sampled)
        return self._is_second

    def over(self) -> generation_pb2.GenerateResponse | None:
        """The end of an answer that lacks nothing else, for which no replica is needed."""
        stop = self._message.stop
        if stop.HasField("max_tokens") and self.num_tokens >= stop.max_tokens > 0:
            return self.end(generation_pb2.FINISH_REASON_LENGTH)
        if stop.HasField("time_budget") and self._left_s() <= 0:
            return self.end(generation_pb2.FINISH_REASON_TIME_LIMIT)
        return None

    async def rest(self, tokenize: Tokenize) -> generation_pb2.GenerateRequest:
        """The request for what is missing. From here on, responses are those to it. Raises GenserveError."""
        if self._has_begun and not self._has_output:
            raise GenserveError("only a part of the prompt was delivered, which is too large for one message")
        message = self._message
        kind = message.WhichOneof("prompt")
        if kind != "token_ids":
            # As Generate does. Asked for once: the ids are the prompt from here on.
            asked = generation_pb2.TokenizeRequest()
            if kind == "chat":
                asked.chat.CopyFrom(message.chat)
            else:
                asked.text = message.text
            message.token_ids.ids[:] = (await tokenize(asked)).token_ids
        self._is_second = True
        self._offset = self.num_tokens
        self._spans_before = self._spans
        self._logprob_before = self._logprob
        rest = generation_pb2.GenerateRequest()
        rest.CopyFrom(message)
        rest.token_ids.ids.extend(self._token_ids)
        stop = rest.stop
        if stop.HasField("max_tokens"):
            stop.max_tokens -= self._offset
        if stop.HasField("min_tokens"):
            stop.min_tokens = max(0, stop.min_tokens - self._offset)
        if stop.HasField("time_budget"):
            stop.time_budget.CopyFrom(duration_of(max(_LEAST_BUDGET_S, self._left_s())))
        if self._has_begun:  # the prompt is delivered
            rest.output.ClearField("prompt_logprobs")
            rest.output.ClearField("prompt_token_ids")
        if self._offset and rest.sampling.HasField("seed") and rest.sampling.seed != _NO_SEED:
            rest.sampling.seed = seed_of_rest(rest.sampling.seed, self._offset)
        return rest

    def end(self, reason: generation_pb2.FinishReason.ValueType) -> generation_pb2.GenerateResponse:
        """The end of an answer to which no replica adds anything."""
        response = generation_pb2.GenerateResponse()
        usage, finish = response.usage, response.outputs.add().finish
        usage.num_prompt_tokens = self._num_prompt_tokens
        usage.num_cached_tokens = self._num_cached_tokens
        usage.num_output_tokens = finish.num_tokens = self.num_tokens
        finish.reason = reason
        finish.weight_spans.extend(self._spans)
        if self._message.output.HasField("logprobs"):
            finish.cumulative_logprob = self._logprob
        return response

    def _continue(self, response: generation_pb2.GenerateResponse) -> None:
        """The answer of a second replica, changed into one of the first."""
        offset = self._offset
        if self._has_begun:
            response.ClearField("request_id")
            response.ClearField("prompt")
        elif response.HasField("prompt"):
            self._num_prompt_tokens = response.prompt.num_tokens
            self._num_cached_tokens = response.prompt.num_cached_tokens
        if response.HasField("usage"):
            response.usage.num_prompt_tokens = self._num_prompt_tokens
            response.usage.num_cached_tokens = self._num_cached_tokens
            response.usage.num_output_tokens += offset
        for delta in response.outputs:
            _shift(delta.weight_spans, offset)
            if delta.HasField("finish"):
                finish = delta.finish
                finish.num_tokens += offset
                _shift(finish.weight_spans, offset)
                whole = _joined([*self._spans_before, *finish.weight_spans])
                del finish.weight_spans[:]
                finish.weight_spans.extend(whole)
                if finish.HasField("cumulative_logprob"):
                    finish.cumulative_logprob += self._logprob_before

    def _left_s(self) -> float:
        return seconds_of(self._message.stop.time_budget) - (time.monotonic() - self._admitted_s)


def seed_of_rest(seed: int, num_tokens: int) -> int:
    """The seed for what follows so many tokens of a request with a seed. With that one itself the rest would be drawn
    with the random numbers that have drawn the beginning. The same after every loss at this token, in [0, 2^63)."""
    digest = hashlib.blake2b(f"{seed}:{num_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _shift(spans: Iterable[types_pb2.WeightSpan], offset: int) -> None:
    for span in spans:
        span.start += offset
        span.end += offset


def _joined(spans: Iterable[types_pb2.WeightSpan]) -> list[types_pb2.WeightSpan]:
    """Copies of the spans; those of the same versions that follow each other are one."""
    joined: list[types_pb2.WeightSpan] = []
    for span in spans:
        now = span.version, span.lora_version
        if joined and (joined[-1].version, joined[-1].lora_version) == now and joined[-1].end == span.start:
            joined[-1].end = span.end
        else:
            joined.append(types_pb2.WeightSpan())
            joined[-1].CopyFrom(span)
    return joined
