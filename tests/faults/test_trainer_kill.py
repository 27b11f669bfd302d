"""A trainer that is killed while it pushes."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from genserve.client import AsyncClient, Generation
from genserve.errors import PushNotFoundError
from tests.support import patience
from tests.support.faulty_worker import SLOW_RUN, Fault
from tests.support.subject import Subject

LONG = pytest.mark.long("genserve/weights", "genserve/rpc")
NUM_TOKENS = 200


@asynccontextmanager
async def trainer(
    subject: Subject, version: int, push_id: str, percent: int, ttl_s: int = 6
) -> AsyncIterator[tuple[Process, int]]:
    """A process that has sent this share of checkpoint b, and how many bytes that are."""
    arguments = [subject.process.address, subject.checkpoints["b"], version, push_id, percent, ttl_s]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.faults.trainer", *map(str, arguments), stdout=PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(patience.START_S):
            line = (await process.stdout.readline()).split()
        assert line[:1] == [b"sent"], "the trainer failed"
        yield process, int(line[1])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def killed(process: Process) -> None:
    """SIGKILL: nothing is flushed, closed or said."""
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def one_stream(client: AsyncClient, first: asyncio.Event) -> Generation:
    """A long greedy stream; sets the event at its first tokens."""
    generation = Generation()
    async for delta in client.stream([2, 7, 1, 8], temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True):
        generation.add(delta)
        first.set()
    return generation


@pytest.mark.parametrize("percent", [50, *(pytest.param(each, marks=LONG) for each in (0, 1, 99))])
async def test_a_trainer_killed_in_a_push_leaves_nothing(subject: Subject, percent: int) -> None:
    """Streams run on, what was staged is freed when its time to live ends, and the next push works."""
    version = await subject.oracle.served_version()
    push_id, begun = f"killed at {percent} %", asyncio.Event()
    async with trainer(subject, version + 1, push_id, percent) as (process, sent_bytes):
        await subject.until_push(push_id, received_bytes=sent_bytes)
        subject.order(SLOW_RUN)
        streams = [asyncio.create_task(one_stream(subject.client, begun)) for _ in range(2)]
        await begun.wait()
        await killed(process)
        assert (await subject.client.get_push(push_id)).push.received_bytes == sent_bytes
        assert not any(stream.done() for stream in streams), "the streams did not live across the kill"
        subject.release()
        for stream in streams:
            generation = await stream
            assert len(generation.token_ids) == NUM_TOKENS
            assert {span.version for span in generation.sequences[0].weight_spans} == {version}
    await subject.oracle.holds((version, "a"))
    with pytest.raises(PushNotFoundError):
        await subject.client.get_push(push_id)


async def test_a_trainer_killed_before_its_answer_gets_it_when_it_is_back(subject: Subject) -> None:
    """All bytes and the end were sent: the push is applied, once, and its repetition is answered."""
    version = await subject.oracle.served_version() + 1
    subject.oracle.committed[version] = "b"
    subject.order(Fault("commit", "slow", seconds=0.5, times=-1))
    async with trainer(subject, version, "killed at the end", 100) as (process, _):
        await subject.until_fired()
        await killed(process)
    await subject.until_push("killed at the end", state="applied")
    again = await subject.push("b", version=version, push_id="killed at the end")
    assert again.applied is not None
    assert again.applied.previous_version == version - 1
    assert subject.fired == 1
    subject.release()
    await subject.oracle.holds((version, "b"))


async def test_a_killed_trainer_can_resume_what_it_sent(subject: Subject) -> None:
    """Started anew, it says which attempt it takes up and sends only what is missing, within the time to live."""
    version = await subject.oracle.served_version() + 1
    async with trainer(subject, version, "resumed", 50, ttl_s=60) as (process, sent_bytes):
        await subject.until_push("resumed", received_bytes=sent_bytes)
        await killed(process)
    raw = await subject.raw_push()
    raw.header.push_id = raw.header.attempt = "resumed"
    missing = (await subject.client.get_push("resumed")).push.missing
    assert missing == [(sent_bytes, len(raw.data))]
    await raw.send(raw.frames(*missing))
    await subject.oracle.holds((version, "b"))
