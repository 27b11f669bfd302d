"""Streams that live across pushes, and whether the version that each token is labelled with is the one that sampled
it."""

import asyncio

from genserve.client import AsyncClient, Delta, GeneratedSequence, Generation, WeightSpan

TOLERANCE = 0.15
"""By how much (log-probability) a greedy token may be behind the likeliest one: bfloat16, and another batch."""


class Recorded:
    """One stream: its tokens, and the versions that its deltas and its end say."""

    def __init__(self, number: int) -> None:
        self.prompt = [number + 1, 3 * number + 5, 77]
        self.generation = Generation()
        self.labels: list[int] = []
        """By token, as the deltas said while the stream ran."""

    def add(self, delta: Delta) -> None:
        """Takes a delta; its spans must cover just its tokens."""
        self.generation.add(delta)
        for output in delta.outputs:
            for span in output.weight_spans:
                assert span.start == len(self.labels), "a span does not begin where the last one ended"
                self.labels += [span.version] * (span.end - span.start)
            assert len(self.labels) == len(self.generation.token_ids), "tokens and spans do not agree"

    @property
    def sequence(self) -> GeneratedSequence:
        """The only one."""
        return self.generation.sequences[0]


class Progress:
    """How far streams have come, by their numbers."""

    def __init__(self, num_streams: int) -> None:
        self._counts = [0] * num_streams
        self._changed = asyncio.Condition()

    async def tell(self, number: int, count: int) -> None:
        """A stream has so many tokens."""
        self._counts[number] = count
        async with self._changed:
            self._changed.notify_all()

    async def reached(self, count: int) -> None:
        """Returns when all streams have so many tokens."""
        async with self._changed:
            await self._changed.wait_for(lambda: min(self._counts) >= count)


async def record(client: AsyncClient, number: int, num_tokens: int, progress: Progress) -> Recorded:
    """Runs one greedy stream to its end."""
    recorded = Recorded(number)
    async for delta in client.stream(
        recorded.prompt, temperature=0.0, max_tokens=num_tokens, ignore_eos=True, timeout_s=120.0
    ):
        recorded.add(delta)
        await progress.tell(number, len(recorded.labels))
    return recorded


def labels_of(spans: list[WeightSpan]) -> list[int]:
    """The version of each token."""
    return [span.version for span in spans for _ in range(span.start, span.end)]


async def behind(client: AsyncClient, recorded: Recorded, salt: str) -> list[float]:
    """By how much each token is less likely, under what is served now, than the likeliest one."""
    tokens = recorded.sequence.token_ids
    scored = await client.generate(
        [*recorded.prompt, *tokens], prompt_logprobs=1, max_tokens=1, cache_salt=salt, timeout_s=120.0
    )
    assert scored.prompt is not None and scored.prompt.logprobs is not None
    logprobs, first = scored.prompt.logprobs, len(recorded.prompt) - 1
    assert logprobs.width == 1
    return [logprobs.values[row] - logprobs.sampled[row] for row in range(first, first + len(tokens))]
