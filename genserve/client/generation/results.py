"""The results of a generation: strict deltas as they stream, and their sum.

Token positions count from 0 in a sequence's output. Log-probabilities are natural logarithms.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from google.protobuf.message import Message
from google.protobuf.text_format import MessageToString

from genserve.errors import GenserveError
from genserve.transport.fields import word_of
from genserve.v1 import generation_pb2, types_pb2

_MAX_INDEX: Final = 1 << 16
"""Far more than vLLM allows a request: an index that is damaged shall not fill the memory."""


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of consecutive tokens, as columns."""

    sampled: list[float] = field(default_factory=list)
    """Of each token."""
    ranks: list[int] = field(default_factory=list)
    """Rank of each token in its distribution, 1 = most likely."""
    width: int = 0
    """Number of alternatives per token."""
    token_ids: list[int] = field(default_factory=list)
    """Alternatives, most likely first; row-major, `width` per token."""
    values: list[float] = field(default_factory=list)
    """Their log-probabilities, laid out as `token_ids`."""

    def alternatives(self, position: int) -> list[tuple[int, float]]:
        """The (token id, log-probability) pairs at one position, most likely first."""
        row = slice(position * self.width, (position + 1) * self.width)
        return list(zip(self.token_ids[row], self.values[row], strict=True))

    def rows(self, start: int, end: int) -> "Logprobs":
        """The tokens [start, end)."""
        entries = slice(start * self.width, end * self.width)
        return Logprobs(
            self.sampled[start:end], self.ranks[start:end], self.width, self.token_ids[entries], self.values[entries]
        )

    def extend(self, other: "Logprobs") -> None:
        """Appends the tokens of `other`."""
        self.sampled += other.sampled
        self.ranks += other.ranks
        self.width = max(self.width, other.width)
        self.token_ids += other.token_ids
        self.values += other.values

    @classmethod
    def of(cls, message: types_pb2.Logprobs) -> "Logprobs":
        """From the wire."""
        return cls(
            list(message.sampled), list(message.ranks), message.width, list(message.token_ids), list(message.values)
        )


class WeightSpan(NamedTuple):
    """Output tokens [start, end) were sampled under weights `version`, 0 = those before the first push, and under
    `lora_version` of the adapter that the request named, 0 = no adapter."""

    version: int
    start: int
    end: int
    lora_version: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Facts about the prompt. Token ids and log-probabilities are there if requested.

    The first token has no log-probability, so there are `num_tokens - 1` of them.
    """

    num_tokens: int
    num_cached_tokens: int
    token_ids: list[int]
    logprobs: Logprobs | None

    @classmethod
    def of(cls, message: generation_pb2.Prompt) -> "Prompt":
        """From the wire."""
        logprobs = Logprobs.of(message.logprobs) if message.HasField("logprobs") else None
        return cls(message.num_tokens, message.num_cached_tokens, list(message.token_ids), logprobs)

    def add(self, more: "Prompt") -> None:
        """Appends what the next message says of a prompt that is too large for one."""
        self.token_ids.extend(more.token_ids)
        if self.logprobs is not None and more.logprobs is not None:
            self.logprobs.extend(more.logprobs)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted; output tokens are those of all sequences together."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended.

    `reason` is one of eos, stop_string, stop_token, length, time_limit, aborted, paused, repetition.
    """

    reason: str
    stop_token_id: int | None
    stop_string: str | None
    num_tokens: int
    weight_spans: list[WeightSpan]
    cumulative_logprob: float | None

    @classmethod
    def of(cls, message: generation_pb2.Finish) -> "Finish":
        """From the wire."""
        return cls(
            reason=word_of(generation_pb2.FinishReason, message.reason),
            stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
            stop_string=message.stop_string if message.HasField("stop_string") else None,
            num_tokens=message.num_tokens,
            weight_spans=_spans(message.weight_spans),
            cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
        )


class SequenceDelta:
    """New output of one of the n sequences: a view of `message`, so that unread parts cost nothing."""

    __slots__ = ("_message",)

    def __init__(self, message: generation_pb2.SequenceDelta) -> None:
        self._message = message

    @property
    def message(self) -> generation_pb2.SequenceDelta:
        """The message."""
        return self._message

    @property
    def index(self) -> int:
        """Which of the n sequences."""
        return self.message.index

    @property
    def text(self) -> str:
        """The new text; it may lag behind the tokens."""
        return self.message.text

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return list(self.message.token_ids)

    @property
    def logprobs(self) -> Logprobs | None:
        """Of the new tokens, when asked for."""
        return Logprobs.of(self.message.logprobs) if self.message.HasField("logprobs") else None

    @property
    def weight_spans(self) -> list[WeightSpan]:
        """Of exactly the new tokens."""
        return _spans(self.message.weight_spans)

    @property
    def finish(self) -> Finish | None:
        """Set on the last delta of the sequence."""
        return Finish.of(self.message.finish) if self.message.HasField("finish") else None

    def __repr__(self) -> str:
        return f"SequenceDelta({_line(self.message)})"


class Delta:
    """One message of a stream: a view of `message`, so that unread parts cost nothing."""

    __slots__ = ("_message",)

    def __init__(self, message: generation_pb2.GenerateResponse) -> None:
        self._message = message

    @property
    def message(self) -> generation_pb2.GenerateResponse:
        """The message."""
        return self._message

    @property
    def request_id(self) -> str:
        """Id of the request; on the first message."""
        return self.message.request_id

    @property
    def prompt(self) -> Prompt | None:
        """What is known of the prompt; on the first message. If that is too large for one message, it goes on in the
        next ones, before any output."""
        return Prompt.of(self.message.prompt) if self.message.HasField("prompt") else None

    @property
    def outputs(self) -> list[SequenceDelta]:
        """The sequences with new output."""
        return list(map(SequenceDelta, self.message.outputs))

    @property
    def usage(self) -> Usage | None:
        """Tokens counted; on the last message."""
        if not self.is_last:
            return None
        usage = self.message.usage
        return Usage(usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens)

    @property
    def is_last(self) -> bool:
        """Whether this is the last message."""
        return self.message.HasField("usage")

    @property
    def text(self) -> str:
        """The new text of sequence 0."""
        return "".join(output.text for output in self.message.outputs if output.index == 0)

    def __repr__(self) -> str:
        return f"Delta({_line(self.message)})"


class _Text:
    """A text that grows: joined when it is read, because appending to a text copies it."""

    def __get__(self, sequence: "GeneratedSequence | None", kind: type) -> str:
        if sequence is None:
            return ""  # the default
        pieces = sequence.__dict__["_texts"]
        if len(pieces) > 1:
            pieces[:] = ["".join(pieces)]
        return pieces[0]  # type: ignore[no-any-return]

    def __set__(self, sequence: "GeneratedSequence", text: str) -> None:
        sequence.__dict__["_texts"] = [text]

    @staticmethod
    def append(sequence: "GeneratedSequence", text: str) -> None:
        """Adds a piece."""
        sequence.__dict__["_texts"].append(text)


@dataclass
class GeneratedSequence:
    """One complete sequence. `weight_spans` cover it without gaps. `logprobs` has one row per token, if requested."""

    index: int
    text: _Text = _Text()  # a descriptor
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    weight_spans: list[WeightSpan] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def finish_reason(self) -> str:
        """Why it ended, see `Finish`; "unspecified" while it runs."""
        return self.finish.reason if self.finish is not None else "unspecified"

    def add(self, delta: SequenceDelta) -> None:
        """Appends new output."""
        if text := delta.text:
            _Text.append(self, text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = Logprobs() if self.logprobs is None else self.logprobs
            self.logprobs.extend(delta.logprobs)
        for span in delta.weight_spans:
            last = self.weight_spans[-1] if self.weight_spans else None
            if last is not None and last == (span.version, last.start, span.start, span.lora_version):
                self.weight_spans[-1] = span._replace(start=last.start)
            else:
                self.weight_spans.append(span)
        if delta.finish is not None:
            self.finish = delta.finish
            self.weight_spans = list(delta.finish.weight_spans)


@dataclass(slots=True)
class Generation:
    """The sum of a stream's deltas."""

    request_id: str = ""
    prompt: Prompt | None = None
    sequences: list[GeneratedSequence] = field(default_factory=list)
    """The n sequences, by index."""
    usage: Usage | None = None
    error: GenserveError | None = None
    """Why it failed, if the error was not raised."""

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.sequences[0].text if self.sequences else ""

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first sequence."""
        return self.sequences[0].token_ids if self.sequences else []

    def add(self, delta: Delta) -> None:
        """Adds the next message of the stream."""
        self.request_id = delta.request_id or self.request_id
        if (prompt := delta.prompt) is not None:
            if self.prompt is None:
                self.prompt = prompt
            else:
                self.prompt.add(prompt)
        self.usage = delta.usage if delta.usage is not None else self.usage
        for output in delta.outputs:
            if output.index > _MAX_INDEX:
                raise GenserveError(f"the daemon answered with sequence {output.index}")
            while len(self.sequences) <= output.index:
                self.sequences.append(GeneratedSequence(len(self.sequences)))
            self.sequences[output.index].add(output)


def _spans(messages: Iterable[types_pb2.WeightSpan]) -> list[WeightSpan]:
    return [WeightSpan(span.version, span.start, span.end, span.lora_version) for span in messages]


def _line(message: Message) -> str:
    return MessageToString(message, as_one_line=True)
