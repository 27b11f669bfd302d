"""Streams that live across pushes, and whether the version that each token is labelled with is the one that sampled
it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from genserve.client import AsyncClient, Delta, GeneratedSequence, Generation, WeightSpan

TOLERANCE = 0.15
"""By how much (log-probability) a greedy token may be behind the likeliest one: bfloat16, and another batch."""
_MAX_TOKENS = 2000  # the model's context has 2048


class Recorded:
    """One stream: its tokens, and the versions that its deltas and its end say."""

    def __init__(self, number: int) -> None:
        self.request_id = f"recorded-{number}"
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


class LiveStreams:
    """Greedy streams that run until they are ended, however long what happens meanwhile takes."""

    def __init__(self, client: AsyncClient, num_streams: int) -> None:
        self._client = client
        self._streams = [Recorded(number) for number in range(num_streams)]
        self._has_more = asyncio.Condition()

    @classmethod
    @asynccontextmanager
    async def running(cls, client: AsyncClient, num_streams: int) -> AsyncIterator[Self]:
        """Runs them; they have to be ended inside."""
        streams = cls(client, num_streams)
        async with asyncio.TaskGroup() as group:
            for stream in streams._streams:
                group.create_task(streams._record(stream))
            yield streams

    async def _record(self, stream: Recorded) -> None:
        options: Any = {"temperature": 0.0, "max_tokens": _MAX_TOKENS, "ignore_eos": True, "timeout_s": 120.0}
        async for delta in self._client.stream(stream.prompt, request_id=stream.request_id, **options):
            async with self._has_more:
                stream.add(delta)
                self._has_more.notify_all()

    async def gained(self, num_tokens: int) -> None:
        """Returns when each of them has so many tokens more."""
        wanted = [len(stream.labels) + num_tokens for stream in self._streams]
        async with self._has_more:
            await self._has_more.wait_for(
                lambda: all(len(each.labels) >= count for each, count in zip(self._streams, wanted, strict=True))
            )

    async def end(self) -> list[Recorded]:
        """Ends them, all of which still run, and returns them when they have ended."""
        ids = [stream.request_id for stream in self._streams]
        aborted = await self._client.abort(ids)
        assert sorted(aborted.aborted_ids) == sorted(ids), "a stream has ended by itself"
        async with self._has_more:
            await self._has_more.wait_for(lambda: all(stream.sequence.finish for stream in self._streams))
        return self._streams


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
