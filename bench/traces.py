"""What a client saw of its streams, and what that comes to."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from genserve.cli.bench import percentile

OUTPUTS = ("tokens", "logprobs", "text")
"""What is asked for: token ids; with the log-probability of each; and with the text as well."""


@dataclass(frozen=True, slots=True)
class Work:
    """Requests to make, `concurrency` at a time: a slot makes its next one when its last has ended. `final_only`: one
    message with all tokens instead of one a token. `outputs` is one of OUTPUTS."""

    prompts: list[list[int]]
    concurrency: int
    max_tokens: int
    final_only: bool = False
    outputs: str = "tokens"

    @property
    def logprobs(self) -> bool:
        """Whether the log-probability of each token is asked for."""
        return self.outputs != "tokens"

    @property
    def text(self) -> bool:
        """Whether text is asked for."""
        return self.outputs == "text"


@dataclass(slots=True)
class Trace:
    """One request: when it was sent, and when each message with tokens came; seconds of one monotonic clock. Text and
    log-probabilities are there if they were asked for: every client reads what it has asked for."""

    sent_at: float
    arrived_at: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Figures:
    """What the requests of one run came to. `inter_token`: the wait between two messages of a stream, of which there
    are fewer than tokens where a peer put several tokens into one message."""

    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float
    tokens_per_message: float

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> "Figures":
        """Of one run."""
        num_tokens = sum(len(trace.token_ids) for trace in traces)
        num_messages = sum(len(trace.arrived_at) for trace in traces)
        elapsed_s = max(trace.arrived_at[-1] for trace in traces) - min(trace.sent_at for trace in traces)
        first_s = [trace.arrived_at[0] - trace.sent_at for trace in traces]
        waits_s = waits(traces)
        return cls(
            tokens_per_s=num_tokens / elapsed_s,
            ttft_p50_ms=1000 * percentile(first_s, 0.5),
            ttft_p99_ms=1000 * percentile(first_s, 0.99),
            inter_token_p50_ms=1000 * percentile(waits_s, 0.5),
            inter_token_p99_ms=1000 * percentile(waits_s, 0.99),
            tokens_per_message=num_tokens / num_messages,
        )


def waits(traces: Sequence[Trace]) -> list[float]:
    """Seconds between two messages of a stream, of all streams."""
    return [later - earlier for trace in traces for earlier, later in itertools.pairwise(trace.arrived_at)]


async def closed_loop(work: Work, stream: Callable[[int, list[int]], Awaitable[Trace]]) -> list[Trace]:
    """All requests of `work`, each made by `stream(number, prompt)`; their traces in order of the prompts."""
    traces: list[Trace | None] = [None] * len(work.prompts)
    left = iter(enumerate(work.prompts))

    async def slot() -> None:
        for number, prompt in left:
            traces[number] = await stream(number, prompt)

    try:
        async with asyncio.TaskGroup() as slots:
            for _ in range(work.concurrency):
                slots.create_task(slot())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the other slots were cancelled, or failed of the same
    return [trace for trace in traces if trace is not None]
