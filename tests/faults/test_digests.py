"""Digests of the live weights, asked for in front of a real engine."""

import asyncio

from tests.support.faulty_worker import Fault
from tests.support.subject import Subject

READS = Fault("digests", "slow", seconds=0.01, times=-1)
"""Tells how often the workers were asked to read."""


async def test_concurrent_callers_share_one_reading_of_the_weights(subject: Subject) -> None:
    """At the same time and later. After a push they are read again: those of the version before would be wrong."""
    subject.order(READS)
    known = []
    for name in ("b", "a"):
        await subject.push(name)
        before = subject.fired
        asking = (subject.client.get_weights(include_digests=True) for _ in range(8))
        first, *others = await asyncio.gather(*asking)
        assert all(other.digests == first.digests for other in others)
        assert first.digests == subject.oracle.known[name].digests
        assert subject.fired > before
        num_read = subject.fired
        assert (await subject.client.get_weights(include_digests=True)).digests == first.digests
        assert subject.fired == num_read + 1, "the workers were asked for more than what they know"
        known.append(first.digests)
    assert known[0] != known[1]
    subject.release()
    await subject.oracle.holds((await subject.oracle.served_version(), "a"))
