"""Pushes into many live streams."""

import asyncio

from tests.support.labelled_streams import TOLERANCE, Progress, behind, labels_of, record
from tests.support.subject import Subject

NUM_STREAMS = 64
NUM_TOKENS = 400


async def test_pushes_into_64_streams_end_none_and_label_every_token(subject: Subject) -> None:
    """KEEP: no error; spans monotone, contiguous and exact.

    A greedy token is the likeliest one under the version it is labelled with, all before it given, as a push recomputes
    keys and values; under the other version it mostly is not, which is the control.
    """
    served = await subject.oracle.served_version()
    names = {served: "a", served + 1: "b", served + 2: "a"}
    progress = Progress(NUM_STREAMS)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(record(subject.client, number, NUM_TOKENS, progress)) for number in range(NUM_STREAMS)
        ]
        for version, share in ((served + 1, 0.25), (served + 2, 0.6)):
            await progress.reached(round(share * NUM_TOKENS))
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
            for distance, version in zip(await behind(subject.client, stream, name), stream.labels, strict=True):
                (own if names[version] == name else foreign).append(distance)
        assert max(own) < TOLERANCE, "a token is not the likeliest one of the version it is labelled with"
        assert sum(distance > TOLERANCE for distance in foreign) > 0.5 * len(foreign), "the control tells nothing"
    await subject.oracle.holds((served + 4, "a"))
