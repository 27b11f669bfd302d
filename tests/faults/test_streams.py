"""Pushes into many live streams."""

from tests.support.labelled_streams import TOLERANCE, LiveStreams, behind, labels_of
from tests.support.subject import Subject

NUM_STREAMS = 64
NUM_TOKENS = 30  # under each version, at least


async def test_pushes_into_64_streams_end_none_and_label_every_token(subject: Subject) -> None:
    """KEEP: no error; spans monotone, contiguous and exact.

    A greedy token is the likeliest one under the version it is labelled with, all before it given, as a push recomputes
    keys and values; under the other version it mostly is not, which is the control.
    """
    served = await subject.oracle.served_version()
    names = {served: "a", served + 1: "b", served + 2: "a"}
    async with LiveStreams.running(subject.client, NUM_STREAMS) as live:
        for version in (served + 1, served + 2):
            await live.gained(NUM_TOKENS)
            applied = (await subject.push(names[version], version=version)).applied
            assert applied.requests_kept == NUM_STREAMS
            assert applied.requests_aborted == 0
        await live.gained(NUM_TOKENS)
        streams = await live.end()

    for stream in streams:
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
