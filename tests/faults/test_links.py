"""Links that fail as networks do, under a trainer that holds a pause, and under pushes and streams."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from genserve.client import AsyncClient
from genserve.errors import DeadlineError, PauseLeaseLostError
from tests.support import models
from tests.support.fault_proxy import BOTH, FaultProxy, Way
from tests.support.faulty_worker import SLOW_RUN
from tests.support.oracle import MAX_TOKENS
from tests.support.plain_vllm import PROMPTS
from tests.support.subject import Subject

LEASE_S = 4.0
LATE_S = 15.0
"""What the end of a lease, the resume and the next token may take together."""
HOLD = """
import asyncio, sys
from genserve.client import AsyncClient

async def hold():
    async with AsyncClient(sys.argv[1]) as client, client.paused(holder="trainer", ttl_s=float(sys.argv[2])):
        print("paused", flush=True)
        await asyncio.Event().wait()

asyncio.run(hold())
"""
"""A trainer that holds a pause, and renews it."""
LONG = pytest.mark.long("genserve/rpc", "genserve/client", "genserve/control")
CALLS, ANSWERS = pytest.param((Way.TO_SERVER,), id="calls"), pytest.param((Way.TO_CLIENT,), id="answers")
"""What is lost."""
ALL = pytest.param(BOTH, id="both", marks=LONG)


@asynccontextmanager
async def paused_trainer(address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that holds a pause."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLD, address, str(LEASE_S), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(90):
            assert await process.stdout.readline() == b"paused\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def resumed_after_s(subject: Subject, breaks: Callable[[], object]) -> float:
    """The time from what `breaks` the trainer until a request that waits for the end of the pause has its tokens."""
    request = subject.client.generate([1, 2, 3], max_tokens=1, ignore_eos=True, timeout_s=60)
    waiting = asyncio.create_task(request)
    async with asyncio.timeout(30):
        while (load := (await subject.client.status()).load).running + load.waiting == 0:
            await asyncio.sleep(0.01)
    assert (await subject.client.status()).state.phase == "paused" and not waiting.done()
    began_s = time.monotonic()
    breaks()
    await waiting
    return time.monotonic() - began_s


async def test_generation_goes_on_when_the_trainer_that_paused_it_is_killed(subject: Subject) -> None:
    """SIGKILL: it resumes nothing, and no longer renews its lease."""
    version = await subject.oracle.served_version()
    async with paused_trainer(subject.process.address) as trainer:
        after_s = await resumed_after_s(subject, lambda: os.kill(trainer.pid, signal.SIGKILL))
    print(f"generation went on {after_s:.2f} s after the kill, with a lease of {LEASE_S:g} s")
    assert after_s < LEASE_S + LATE_S
    await subject.oracle.holds((version, "a"))


@pytest.mark.parametrize("ways", [CALLS, pytest.param((Way.TO_CLIENT,), id="answers", marks=LONG), ALL])
async def test_generation_goes_on_when_the_link_of_the_trainer_is_a_black_hole(
    subject: Subject, ways: tuple[Way, ...]
) -> None:
    """The trainer, which still waits for its calls, is told that its lease was lost. If only answers are lost, its
    renewals arrive, and generation goes on when it has given up."""
    version = await subject.oracle.served_version()
    async with FaultProxy(subject.process.address) as link, AsyncClient(link.address) as trainer:

        async def hold() -> None:
            async with trainer.paused(holder="trainer", ttl_s=LEASE_S) as lease:
                nonlocal after_s
                after_s = await resumed_after_s(subject, lambda: link.black_hole(*ways))
                async with asyncio.timeout(10 * LEASE_S):
                    await asyncio.wait([lease.renewal])
                link.heal()

        after_s = 0.0
        with pytest.raises(PauseLeaseLostError):
            await hold()
    print(f"generation went on {after_s:.2f} s after the black hole began, with a lease of {LEASE_S:g} s")
    if Way.TO_SERVER in ways:
        assert after_s < LEASE_S + LATE_S
    await subject.oracle.holds((version, "a"))


@pytest.mark.parametrize("ways", [pytest.param((Way.TO_SERVER,), id="calls", marks=LONG), ANSWERS, ALL])
async def test_calls_into_a_black_hole_end_at_their_deadlines(subject: Subject, ways: tuple[Way, ...]) -> None:
    """Whichever way is lost. A push is applied whole or not at all, and its repetition over a whole link says which."""
    version = await subject.oracle.served_version()
    subject.oracle.committed[version + 1] = "b"
    subject.order(SLOW_RUN)  # tokens come all the time if only calls are lost: they must not be the last ones
    options = {"version": version + 1, "push_id": f"lost with {len(ways)} ways, {ways[0].value}"}
    async with FaultProxy(subject.process.address) as link, AsyncClient(link.address) as client:
        await client.status()
        stream = client.stream([1, 2, 3], max_tokens=1500, ignore_eos=True, timeout_s=5.0)
        await anext(stream)
        link.black_hole(*ways)
        push = client.push_weights(subject.checkpoints["b"], timeout_s=3.0, **options)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            answers = await asyncio.gather(
                client.status(timeout_s=1.0),
                client.generate([1], max_tokens=1, timeout_s=1.0),
                push,
                read_to_the_end(stream),
                return_exceptions=True,
            )
        assert all(isinstance(each, DeadlineError) for each in answers), answers
        subject.release()
        link.heal()
        again = await client.push_weights(subject.checkpoints["b"], **options)  # type: ignore[arg-type]
        applied = again.applied
        assert applied is not None and (applied.previous_version, applied.active_version) == (version, version + 1)
    await subject.oracle.holds((version + 1, "b"))


def num_bytes(subject: Subject) -> int:
    """Of a push."""
    return sum(int(tensor.nbytes) for tensor in models.load_tensors(subject.checkpoints["b"]).values())


async def read_to_the_end(stream: AsyncIterator[object]) -> None:
    """Reads all that comes."""
    async for _ in stream:
        pass


async def test_a_slow_link_slows_a_push_and_nothing_else(subject: Subject) -> None:
    """It takes longer than its time to live in all, and goes on all the time; others generate meanwhile."""
    version = await subject.oracle.served_version()
    subject.oracle.committed[version + 1] = "b"
    total_bytes = num_bytes(subject)
    async with FaultProxy(subject.process.address) as link, AsyncClient(link.address) as trainer:
        link.switch(Way.TO_SERVER, bytes_per_s=total_bytes / 5, delay_s=0.05)
        options = {"chunk_bytes": 32 << 10, "staging_ttl_s": 4.0, "shared_memory": False}
        push = asyncio.create_task(
            trainer.push_weights(subject.checkpoints["b"], version=version + 1, push_id="slow", **options)  # type: ignore[arg-type]
        )
        await subject.until_push("slow", received_bytes=1)
        began_s = time.monotonic()
        for prompt, known in zip(PROMPTS, subject.oracle.known["a"].outputs[0], strict=True):
            generation = await subject.client.generate(prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
            assert generation.token_ids == known
        assert not push.done(), "the push was not slow"
        await push
        print(f"a push of {total_bytes} bytes took {time.monotonic() - began_s:.1f} s")
    await subject.oracle.holds((version + 1, "b"))


async def test_streams_over_a_slow_link_are_exact(subject: Subject) -> None:
    """Delayed, throttled, and held for a while: every token once, and those of a fast link."""
    version = await subject.oracle.served_version()
    options = {"temperature": 0.0, "max_tokens": 300, "ignore_eos": True, "timeout_s": 60.0}
    known = await subject.client.generate(PROMPTS[0], **options)  # type: ignore[arg-type]
    async with FaultProxy(subject.process.address) as link, AsyncClient(link.address) as client:
        link.switch(delay_s=0.05)
        link.switch(Way.TO_CLIENT, bytes_per_s=20_000)
        slow = [asyncio.create_task(client.generate(PROMPTS[0], **options)) for _ in range(8)]  # type: ignore[arg-type]
        await asyncio.wait(slow, timeout=0.5)
        link.black_hole(Way.TO_CLIENT)
        await asyncio.wait(slow, timeout=0.5)
        assert not any(each.done() for each in slow)
        link.switch(Way.TO_CLIENT, is_lost=False)
        for each in await asyncio.gather(*slow):
            assert each.token_ids == known.token_ids
    await subject.oracle.holds((version, "a"))


async def test_a_push_over_a_link_that_is_reset_again_and_again_is_whole(subject: Subject) -> None:
    """The client goes on where it was."""
    version = await subject.oracle.served_version()
    subject.oracle.committed[version + 1] = "b"
    async with FaultProxy(subject.process.address) as link, AsyncClient(link.address) as trainer:
        total_bytes = num_bytes(subject)
        link.switch(Way.TO_SERVER, bytes_per_s=total_bytes / 3)
        options = {"chunk_bytes": 32 << 10, "shared_memory": False}
        push = asyncio.create_task(
            trainer.push_weights(subject.checkpoints["b"], version=version + 1, push_id="reset", **options)  # type: ignore[arg-type]
        )
        for share in (0.2, 0.5, 0.8):
            await subject.until_push("reset", received_bytes=round(share * total_bytes))
            link.reset()
        assert (await push).applied is not None
    await subject.oracle.holds((version + 1, "b"))
