"""Pushes that meet others, or themselves: two at once, repeated, contradicting, out of order."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import pytest

from genserve.errors import (
    ApplyInProgressError,
    PushConflictError,
    VersionNotNewerError,
    WeightVersionMismatchError,
)
from genserve.v1 import weights_pb2, weights_pb2_grpc
from tests.support.faulty_worker import Fault
from tests.support.subject import Subject


async def test_a_push_beside_another_that_is_sending_is_refused_at_once(subject: Subject) -> None:
    """ABORTED, and the metadata names who holds the place. The first one is let finish."""
    raw = await subject.raw_push(ttl_s=60)
    go_on = asyncio.Event()

    async def requests() -> AsyncIterator[weights_pb2.PushWeightsRequest]:
        header, first, second = raw.frames((0, 1000), (1000, len(raw.data)))
        yield header
        yield first
        await go_on.wait()
        yield second
        yield weights_pb2.PushWeightsRequest(end=weights_pb2.PushEnd())

    async with grpc.aio.insecure_channel(subject.process.address) as channel:
        first = asyncio.ensure_future(weights_pb2_grpc.WeightServiceStub(channel).PushWeights(requests(), timeout=60))
        await subject.until_push(raw.header.push_id, received_bytes=1000)
        with pytest.raises(ApplyInProgressError) as raised:
            await subject.push("a", version=raw.header.weight_version, push_id="second")
        assert raised.value.metadata["push_id"] == raw.header.push_id
        go_on.set()
        await first
    subject.oracle.committed[raw.header.weight_version] = "b"
    await subject.oracle.holds((raw.header.weight_version, "b"))


async def test_a_push_beside_another_that_is_applied_is_refused_at_once(subject: Subject) -> None:
    """The same while the workers prepare."""
    version = await subject.oracle.served_version()
    subject.order(Fault("load", "hang", after=3))
    first = asyncio.create_task(subject.push("b", push_id="first"))
    await subject.until_fired()
    with pytest.raises(ApplyInProgressError) as raised:
        await subject.client.push_weights(subject.checkpoints["a"], version=version + 2)
    assert raised.value.metadata["push_id"] == "first"
    subject.release()
    assert (await first).applied is not None
    await subject.oracle.holds((version + 1, "b"))


async def test_a_push_whose_answer_was_lost_is_applied_once(subject: Subject) -> None:
    """The client that has gone and comes back gets the answer that it missed; the workers commit once."""
    version = await subject.oracle.served_version() + 1
    subject.order(Fault("commit", "hang"))
    first = asyncio.create_task(subject.push("b", version=version, push_id="lost answer"))
    await subject.until_fired()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    subject.order(Fault("commit", "slow", seconds=0.0, times=-1))  # what hangs goes on, and others are counted
    await subject.until_push("lost answer", state="applied")
    known = await subject.client.get_push("lost answer")
    again = await subject.push("b", version=version, push_id="lost answer")
    assert again.applied is not None and known.applied is not None
    assert again.applied == replace(known.applied, longest_wait_s=None, discard_s=None)
    assert (again.applied.previous_version, again.applied.active_version) == (version - 1, version)
    assert subject.fired == 0, "the workers were asked to commit again"
    await subject.oracle.holds((version, "b"))
    assert subject.fired > 0, "no push reaches the workers: the control fails"
    subject.release()


async def test_a_push_id_stands_for_one_push(subject: Subject) -> None:
    """ALREADY_EXISTS for another version or other tensors, while it is staged and when it is applied."""
    version = await subject.oracle.served_version() + 1
    await subject.push("b", version=version, push_id="taken", action="stage")
    other = await subject.raw_push()
    other.header.push_id, other.header.weight_version = "taken", version
    for spec in other.header.manifest.tensors:  # the same tensors in another order of the byte space
        spec.offset = other.header.manifest.total_bytes - spec.offset - spec.length
    for _ in range(2):
        with pytest.raises(PushConflictError):
            await subject.client.push_weights(subject.checkpoints["b"], version=version + 1, push_id="taken")
        with pytest.raises(PushConflictError):
            await other.send(other.frames())
        await subject.client.commit_push("taken")  # the second time it answers what the first did
    await subject.oracle.holds((version, "b"))


async def test_a_version_must_be_newer_unless_it_is_forced(subject: Subject) -> None:
    """FAILED_PRECONDITION for an older and for an equal one; `force` goes back."""
    served = await subject.oracle.served_version()
    for version in (served, served - 1):
        async with subject.refuses(VersionNotNewerError) as raised:
            await subject.client.push_weights(subject.checkpoints["b"], version=version)
        assert raised.value.metadata["weight_version"] == str(served)
        served = await subject.oracle.served_version()
    for version in (served, served - 1):
        await subject.push("b", version=version, force=True)
        assert await subject.oracle.served_version() == version
    await subject.oracle.holds((served - 1, "b"))


async def test_the_expected_version_must_be_served_when_the_push_is_applied(subject: Subject) -> None:
    """Compare and swap, at the header and again before anything is prepared."""
    served = await subject.oracle.served_version()
    async with subject.refuses(WeightVersionMismatchError):
        await subject.client.push_weights(subject.checkpoints["b"], version=served + 1, expected_version=served + 5)
    served = await subject.oracle.served_version()
    await subject.push("b", version=served + 2, expected_version=served, action="stage", push_id="compares")
    await subject.push("b", version=served + 1)
    with pytest.raises(WeightVersionMismatchError):
        await subject.client.commit_push("compares")
    await subject.client.discard_push("compares")
    await subject.oracle.holds((served + 1, "b"))
