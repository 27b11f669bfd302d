"""Workers that fail, hang or are slow while a push is applied."""

import asyncio
import time

import pytest

from genserve.client import Generation
from genserve.errors import ApplyInProgressError, DeadlineError, PushNotFoundError, PushRolledBackError
from tests.support import models, patience
from tests.support.faulty_worker import SLOW_RUN, Fault, num_entries
from tests.support.raw_push import RawPush
from tests.support.subject import Subject

PATIENCE_S = 5.0
"""After so long a preparation is refused whose bytes are there, while another one is under way."""
LAST = 10_000
"""Stands for the last part of a step."""


def placed(subject: Subject, step: str, after: int) -> int:
    """The number of the part; the last one is known from the pushes before."""
    if after != LAST:
        return after
    return (num_entries(subject.faults) if step in ("commit", "rollback") else num_tensors(subject)) - 1


def num_tensors(subject: Subject) -> int:
    """How many tensors a full push has."""
    return len(models.load_tensors(subject.checkpoints["a"]))


LONG = pytest.mark.long("genserve/worker", "genserve/weights", "genserve/engine/vllm", "tests/support/faulty_worker.py")


@pytest.mark.parametrize(
    ("step", "after"),
    [
        ("prepare", 0),  # the call itself
        ("load", 5),  # its thread, with a part built
        ("commit", 7),  # a part exchanged
        ("commit", -1),  # all of it
        *(
            pytest.param(*each, marks=LONG)
            for each in (("load", 0), ("load", LAST), ("load", -1), ("commit", 0), ("commit", LAST))
        ),
    ],
)
async def test_a_worker_that_raises_leaves_the_previous_version(subject: Subject, step: str, after: int) -> None:
    """PUSH_ROLLED_BACK wherever it is, and a stream that runs meanwhile notices nothing."""
    version = await subject.oracle.served_version()
    subject.order(SLOW_RUN)
    stream = subject.client.stream([3, 1, 4], temperature=0.0, max_tokens=200, ignore_eos=True)
    generation = Generation()
    generation.add(await anext(stream))
    fault = Fault(step, after=placed(subject, step, after))
    await subject.fails(PushRolledBackError, SLOW_RUN, fault)
    async for delta in stream:
        generation.add(delta)
    assert len(generation.token_ids) == 200
    assert {span.version for span in generation.sequences[0].weight_spans} == {version}
    await subject.oracle.holds((version, "a"))


async def test_the_same_push_can_be_sent_again_after_a_worker_raised(subject: Subject) -> None:
    """Under the same push id; its bytes are staged still, so nothing but the header travels."""
    version = await subject.oracle.served_version() + 1
    subject.order(Fault("commit", after=2))
    with pytest.raises(PushRolledBackError):
        await subject.push("b", version=version, push_id="again")
    subject.release()
    assert (await subject.client.get_push("again")).push.state == "failed"
    assert (await subject.client.commit_push("again")).applied is not None
    await subject.oracle.holds((version, "b"))


async def test_a_preparation_that_hangs_ends_in_time_while_generation_goes_on(subject: Subject) -> None:
    """DEADLINE_EXCEEDED; what hangs is a thread beside the live model."""
    version = await subject.oracle.served_version()
    subject.order(Fault("load", "hang", after=4))
    push = asyncio.create_task(subject.push("b", apply_timeout_s=2.0, push_id="hangs"))
    await subject.until_fired()
    assert (await subject.client.generate([1, 2], max_tokens=5, ignore_eos=True)).token_ids
    with pytest.raises(DeadlineError):
        await push
    assert await subject.is_serving()
    assert (await subject.client.generate([1, 2], max_tokens=5, ignore_eos=True)).token_ids
    subject.release()
    await subject.client.discard_push("hangs")
    await subject.oracle.holds((version, "a"))


@LONG  # the commit is refused after five seconds
async def test_a_commit_behind_a_preparation_that_hangs_is_refused(subject: Subject) -> None:
    """It would wait for the thread of the one before."""
    version = await subject.oracle.served_version()
    subject.order(Fault("load", "hang", after=4))
    with pytest.raises(DeadlineError):
        await subject.push("b", apply_timeout_s=2.0, push_id="behind")
    await subject.until_fired()
    with pytest.raises(PushRolledBackError, match="still being prepared"):
        await subject.client.commit_push("behind")
    subject.release()
    await subject.client.discard_push("behind")
    await subject.oracle.holds((version, "a"))


@LONG  # as long as a preparation is waited for whose bytes are there
async def test_a_push_that_arrives_while_workers_are_busy_is_applied(subject: Subject) -> None:
    """Its early preparation waits for its turn as long as the bytes take: they are what it would wait for next."""
    version = await subject.oracle.served_version() + 1
    subject.order(Fault("load", "hang", after=4))
    with pytest.raises(DeadlineError):
        await subject.push("b", apply_timeout_s=1.0, push_id="holds workers up")
    await subject.until_fired()
    raw = RawPush(subject.process.address, subject.checkpoints["b"], version, "arrives")
    began_s = time.monotonic()
    sending = asyncio.create_task(raw.send(raw.frames((0, 9), (9, len(raw.data))), pace_s=4.0))
    await patience.until(lambda: time.monotonic() > began_s + PATIENCE_S + 1.0)
    subject.release()
    assert (await sending).HasField("applied")
    await subject.oracle.holds((version, "b"))


@pytest.mark.parametrize(
    ("step", "after"),
    [
        ("load", 0),  # bytes arrive
        ("load", -1),  # all are there
        ("commit", 7),
        pytest.param("commit", 0, marks=LONG),
        pytest.param("commit", -1, marks=LONG),
    ],
)
async def test_a_push_that_is_cancelled_while_it_is_applied_is_whole(subject: Subject, step: str, after: int) -> None:
    """All new, which GetPush tells, or all old. One that is cancelled while bytes arrive waits for the rest."""
    version = await subject.oracle.served_version()
    push_id = f"cancelled {step} {after}"
    subject.order(Fault(step, "hang", after=after))
    push = asyncio.create_task(subject.push("b", push_id=push_id))
    await subject.until_fired()
    push.cancel()
    with pytest.raises(asyncio.CancelledError):
        await push
    for _ in range(2):  # over the same connection: the daemon has heard of it while the worker is at work
        await subject.client.status()
    subject.release()
    if await is_discarded(subject, push_id):
        await subject.oracle.holds((version, "a"))
    else:
        assert (await subject.client.get_push(push_id)).push.state == "applied"
        await subject.oracle.holds((version + 1, "b"))


async def is_discarded(subject: Subject, push_id: str) -> bool:
    """Discards the push once nobody is at it; whether there was one. There is if it has failed or was cut off, although
    it may lack its end frame alone, and none if it is applied."""
    async with asyncio.timeout(patience.STEP_S):
        while True:
            try:
                await subject.client.discard_push(push_id)
            except PushNotFoundError:
                return False
            except ApplyInProgressError:
                await asyncio.sleep(0.02)
            else:
                return True


@pytest.mark.parametrize("times", [pytest.param(1, marks=LONG), 3])
async def test_a_failing_discard_is_no_failing_push(subject: Subject, times: int) -> None:
    """What was replaced could not be freed: the new version is served all the same, and the next push frees both."""
    version = await subject.oracle.served_version()
    subject.order(Fault("discard", times=times))
    for number in range(times):
        assert (await subject.push("b" if number % 2 == 0 else "a")).applied is not None
    await subject.until_fired(times)
    subject.release()
    await subject.oracle.holds((version + times, "b"), settles=False)


async def test_a_rollback_that_fails_is_made_good_from_the_resident_bytes(subject: Subject) -> None:
    """The exchange cannot be undone: the previous version is prepared and committed anew. Still PUSH_ROLLED_BACK."""
    version = await subject.oracle.served_version()
    await subject.fails(PushRolledBackError, Fault("commit", after=5), Fault("rollback", after=2))
    assert await subject.is_serving()
    await subject.oracle.holds((version, "a"))


async def test_the_label_is_set_back_with_the_weights(subject: Subject) -> None:
    """After a rollback tokens carry the old version again: also those of requests that began after it."""
    version = await subject.oracle.served_version()
    await subject.fails(PushRolledBackError, Fault("commit", after=-1), Fault("rollback", after=0))
    generation = await subject.client.generate([1, 2, 3], max_tokens=5, ignore_eos=True)
    assert {span.version for span in generation.sequences[0].weight_spans} == {version}
    await subject.oracle.holds((version, "a"))


async def test_a_commit_that_is_late_is_undone(subject: Subject) -> None:
    """DEADLINE_EXCEEDED on time; all that a busy machine costs is this push."""
    version = await subject.oracle.served_version()
    subject.order(Fault("commit", "hang", after=3))
    with pytest.raises(DeadlineError):
        await subject.push("b", push_id="late", apply_timeout_s=3.0)
    await subject.until_fired()
    subject.release()
    await subject.until_push("late", state="failed")
    assert (await subject.client.get_push("late")).push.issues[0][1].endswith("was undone")
    await subject.client.discard_push("late")
    await subject.oracle.holds((version, "a"))
