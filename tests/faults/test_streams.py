"""Pushes into many live streams."""

import asyncio

from genserve.client import Delta, GeneratedSequence, Generation, WeightSpan
from tests.support.subject import Subject

NUM_STREAMS = 64
NUM_TOKENS = 400
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


async def record(subject: Subject, number: int, progress: asyncio.Condition, counts: list[int]) -> Recorded:
    """Runs one stream to its end, telling how far it has come."""
    recorded = Recorded(number)
    async for delta in subject.client.stream(
        recorded.prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, timeout_s=120.0
    ):
        recorded.add(delta)
        counts[number] = len(recorded.labels)
        async with progress:
            progress.notify_all()
    return recorded


def labels_of(spans: list[WeightSpan]) -> list[int]:
    """The version of each token."""
    return [span.version for span in spans for _ in range(span.start, span.end)]


async def behind(subject: Subject, recorded: Recorded, salt: str) -> list[float]:
    """By how much each token is less likely, under what is served now, than the likeliest one."""
    tokens = recorded.sequence.token_ids
    scored = await subject.client.generate(
        [*recorded.prompt, *tokens], prompt_logprobs=1, max_tokens=1, cache_salt=salt, timeout_s=120.0
    )
    assert scored.prompt is not None and scored.prompt.logprobs is not None
    logprobs, first = scored.prompt.logprobs, len(recorded.prompt) - 1
    assert logprobs.width == 1
    return [logprobs.values[row] - logprobs.sampled[row] for row in range(first, first + len(tokens))]


async def test_pushes_into_64_streams_end_none_and_label_every_token(subject: Subject) -> None:
    """KEEP: no error; spans monotone, contiguous and exact.

    A greedy token is the likeliest one under the version it is labelled with, all before it given, as a push recomputes
    keys and values; under the other version it mostly is not, which is the control.
    """
    served = await subject.oracle.served_version()
    names = {served: "a", served + 1: "b", served + 2: "a"}
    counts, progress = [0] * NUM_STREAMS, asyncio.Condition()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(record(subject, number, progress, counts)) for number in range(NUM_STREAMS)]
        for version, share in ((served + 1, 0.25), (served + 2, 0.6)):
            async with progress:
                await progress.wait_for(lambda share=share: min(counts) >= share * NUM_TOKENS)  # type: ignore[misc]
            applied = (await subject.push(names[version], version=version)).applied
            assert applied.requests_kept == NUM_STREAMS
            assert applied.requests_aborted == 0
    streams = [task.result() for task in tasks]

    for stream in streams:
        assert len(stream.labels) == NUM_TOKENS
        assert stream.labels == sorted(stream.labels), "a version came back"
        assert set(stream.labels) == set(names), "the stream did not live across both pushes"
        finish = stream.sequence.finish
        assert finish is not None and labels_of(finish.weight_spans) == stream.labels

    for name in ("b", "a"):
        await subject.push(name)
        own: list[float] = []
        foreign: list[float] = []
        for stream in streams[::4]:
            for distance, version in zip(await behind(subject, stream, name), stream.labels, strict=True):
                (own if names[version] == name else foreign).append(distance)
        assert max(own) < TOLERANCE, "a token is not the likeliest one of the version it is labelled with"
        assert sum(distance > TOLERANCE for distance in foreign) > 0.5 * len(foreign), "the control tells nothing"
    await subject.oracle.holds((served + 4, "a"))
