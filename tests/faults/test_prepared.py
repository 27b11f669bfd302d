"""Faults around a push that is prepared and waits for its commit."""

import asyncio
import signal
from pathlib import Path

import pytest

from genserve.errors import DeadlineError, PushNotFoundError, PushRolledBackError, StagingFullError
from tests.support import patience
from tests.support.faulty_worker import Fault
from tests.support.footprint import Remains
from tests.support.subject import Subject, started


async def test_its_commit_asks_no_worker_to_prepare(subject: Subject) -> None:
    """The exchange is all that is left. The oracle's own pushes are the control."""
    version = await subject.oracle.served_version()
    await subject.push("b", action="prepare", push_id="waits")
    subject.order(Fault("prepare", "slow", seconds=0.0, times=-1))
    await subject.client.commit_push("waits")
    assert subject.fired == 0, "the workers were asked to prepare"
    await subject.oracle.holds((version + 1, "b"))
    assert subject.fired > 0, "no push reaches the workers: the control fails"
    subject.release()


LONG = pytest.mark.long("genserve/weights", "genserve/worker")


@pytest.mark.parametrize(
    ("step", "after"), [("load", 3), *(pytest.param(*each, marks=LONG) for each in (("prepare", 0), ("load", -1)))]
)
async def test_a_worker_that_raises_leaves_nothing_prepared(subject: Subject, step: str, after: int) -> None:
    """FAILED; the bytes are there for another commit."""
    version = await subject.oracle.served_version()
    push_id = f"fails in {step} after {after}"
    subject.order(Fault(step, after=after))
    with pytest.raises(PushRolledBackError):
        await subject.push("b", action="prepare", push_id=push_id)
    subject.release()
    assert (await subject.client.get_push(push_id)).push.state == "failed"
    await subject.client.commit_push(push_id)
    await subject.oracle.holds((version + 1, "b"))


@LONG  # test_apply has this with a push that is to be applied
async def test_a_preparation_that_hangs_ends_in_time(subject: Subject) -> None:
    """Generation goes on, and nothing waits for it afterwards."""
    version = await subject.oracle.served_version()
    subject.order(Fault("load", "hang", after=4))
    with pytest.raises(DeadlineError):
        await subject.push("b", action="prepare", push_id="hangs for a later commit", apply_timeout_s=2.0)
    await subject.until_fired()
    assert (await subject.client.generate([1, 2], max_tokens=5, ignore_eos=True)).token_ids
    subject.release()
    await subject.client.discard_push("hangs for a later commit")
    await subject.oracle.holds((version, "a"))


async def test_a_commit_that_fails_is_exchanged_back_and_can_be_repeated(subject: Subject) -> None:
    """It is prepared anew then."""
    version = await subject.oracle.served_version()
    await subject.push("b", action="prepare", push_id="prepared again")
    subject.order(Fault("commit", after=3))
    with pytest.raises(PushRolledBackError):
        await subject.client.commit_push("prepared again")
    subject.release()
    assert await subject.oracle.served_version() == version
    await subject.client.commit_push("prepared again")
    await subject.oracle.holds((version + 1, "b"))


@pytest.mark.parametrize("end", ["discarded", "expired"])
async def test_the_memory_of_one_that_is_gone_is_free(subject: Subject, end: str) -> None:
    """In the daemon and in the workers: the oracle compares with what they had before."""
    version = await subject.oracle.served_version()
    ttl_s = 0.2 if end == "expired" else 600.0
    await subject.push("b", action="prepare", push_id="gone", prepared_ttl_s=ttl_s, staging_ttl_s=600.0)
    if end == "discarded":
        with pytest.raises(StagingFullError) as full:
            await subject.push("b", action="prepare", push_id="beside it")
        assert full.value.metadata["push_id"] == "gone"
        await subject.client.discard_push("gone")
    async with asyncio.timeout(patience.STEP_S):
        while True:
            try:
                await subject.client.get_push("gone")
            except PushNotFoundError:
                break
            await asyncio.sleep(0.05)
    with pytest.raises(PushNotFoundError):
        await subject.client.commit_push("gone")
    await subject.oracle.holds((version, "a"))


async def test_a_shutdown_does_not_wait_for_the_commit(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """SIGTERM with a prepared push is a clean exit, and nothing is left of the daemon."""
    async with started(checkpoints, tmp_path, begins=False) as daemon:
        await daemon.push("b", version=1, action="prepare", prepared_ttl_s=3600.0)
        remains = Remains(daemon.pid)
        daemon.process.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(daemon.process.exit_status, 60) == 0
        assert await remains.left() == []
