"""Pushes into an engine that sleeps."""

import pytest

from genserve.errors import EngineSleepingError
from tests.support.faulty_worker import Fault
from tests.support.subject import Subject


@pytest.mark.parametrize("staged", [False, True])
async def test_a_push_while_asleep_is_refused_and_the_engine_lives(subject: Subject, staged: bool) -> None:
    """ENGINE_SLEEPING for a push and for a commit of what was staged before; after the wake-up both work."""
    version = await subject.oracle.served_version()
    subject.order(Fault("prepare", "slow", seconds=0.0, times=-1))
    if staged:
        await subject.push("b", action="stage", push_id="before sleep")
    assert (await subject.client.sleep()).phase == "sleeping"
    push = subject.client.commit_push("before sleep") if staged else subject.push("b")
    with pytest.raises(EngineSleepingError):
        await push
    assert not await subject.is_serving()
    with pytest.raises(EngineSleepingError):
        await subject.client.generate([1, 2], max_tokens=1)
    assert (await subject.client.wake_up()).phase == "running"
    assert await subject.is_serving()
    assert subject.fired == 0
    if staged:
        assert (await subject.client.commit_push("before sleep")).applied is not None
    await subject.oracle.holds((version + 1, "b") if staged else (version, "a"))
