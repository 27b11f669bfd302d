"""What a generation gives back: strict deltas as they stream, and their sum.

Token positions count from 0 in a sequence's output. Log-probabilities are natural logarithms.
"""

from dataclasses import dataclass, field

from genserve.client.enums import word_of
from genserve.errors import GenserveError
from genserve.v1 import generation_pb2, types_pb2


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
    """Alternatives, most likely first; row-major, `width` a token."""
    values: list[float] = field(default_factory=list)
    """Their log-probabilities, laid out as `token_ids`."""

    def alternatives(self, position: int) -> list[tuple[int, float]]:
        """The (token id, log-probability) pairs at one position, most likely first."""
        row = slice(position * self.width, (position + 1) * self.width)
        return list(zip(self.token_ids[row], self.values[row], strict=True))

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


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Output tokens [start, end) were sampled under weights `version`; 0 = those before the first push."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of the prompt; token ids and log-probabilities when asked for.

    The first token has no log-probability: there are `num_tokens - 1` of them.
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
            weight_spans=[WeightSpan(span.version, span.start, span.end) for span in message.weight_spans],
            cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
        )


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """What one of the n sequences gained; `finish` is set on its last delta."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None
    weight_spans: list[WeightSpan]
    finish: Finish | None

    @classmethod
    def of(cls, message: generation_pb2.SequenceDelta) -> "SequenceDelta":
        """From the wire."""
        return cls(
            index=message.index,
            text=message.text,
            token_ids=list(message.token_ids),
            logprobs=Logprobs.of(message.logprobs) if message.HasField("logprobs") else None,
            weight_spans=[WeightSpan(span.version, span.start, span.end) for span in message.weight_spans],
            finish=Finish.of(message.finish) if message.HasField("finish") else None,
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """One message of a stream: `request_id` and `prompt` come with the first, `usage` with the last."""

    request_id: str
    prompt: Prompt | None
    outputs: list[SequenceDelta]
    usage: Usage | None
    message: generation_pb2.GenerateResponse = field(repr=False, compare=False)
    """The message as it came."""

    @property
    def text(self) -> str:
        """The new text of sequence 0."""
        return "".join(output.text for output in self.outputs if output.index == 0)

    @classmethod
    def of(cls, message: generation_pb2.GenerateResponse) -> "Delta":
        """From the wire."""
        usage = message.usage
        return cls(
            request_id=message.request_id,
            prompt=Prompt.of(message.prompt) if message.HasField("prompt") else None,
            outputs=[SequenceDelta.of(output) for output in message.outputs],
            usage=Usage(usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens)
            if message.HasField("usage")
            else None,
            message=message,
        )


@dataclass(slots=True)
class GeneratedSequence:
    """One whole sequence; `weight_spans` cover it without gaps, `logprobs` has a row a token when asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    weight_spans: list[WeightSpan] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def finish_reason(self) -> str:
        """Why it ended, see `Finish`; "unspecified" while it has not."""
        return self.finish.reason if self.finish is not None else "unspecified"

    def add(self, delta: SequenceDelta) -> None:
        """Appends what the sequence gained."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = Logprobs() if self.logprobs is None else self.logprobs
            self.logprobs.extend(delta.logprobs)
        for span in delta.weight_spans:
            last = self.weight_spans[-1] if self.weight_spans else None
            if last is not None and last.version == span.version and last.end == span.start:
                self.weight_spans[-1] = WeightSpan(span.version, last.start, span.end)
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
    """Why it failed, where that was not raised."""

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
        self.prompt = delta.prompt if delta.prompt is not None else self.prompt
        self.usage = delta.usage if delta.usage is not None else self.usage
        for output in delta.outputs:
            while len(self.sequences) <= output.index:
                self.sequences.append(GeneratedSequence(len(self.sequences)))
            self.sequences[output.index].add(output)
