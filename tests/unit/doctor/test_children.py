"""Processes that the doctor starts end with it, and so do theirs."""

import asyncio
import os
import sys

import psutil
import pytest

from genserve.doctor.children import Children
from genserve.launcher.process_group import members_of
from tests.support.patience import until

FAMILY = """
import signal, subprocess, sys, time
{on_term}
child = subprocess.Popen([sys.executable, "-c", "import signal, time; {on_term_child}; time.sleep(600)"])
print(child.pid, flush=True)
while True:
    time.sleep(0.05)  # a signal that comes just before a wait does not wake it
"""
IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
END_CHILD = "signal.signal(signal.SIGTERM, lambda *_: (child.terminate(), child.wait(), sys.exit(0)))"


def family(on_term: str = "", on_term_child: str = "pass") -> str:
    """A program that starts another one, and sleeps with it."""
    return FAMILY.format(on_term=on_term, on_term_child=on_term_child)


async def start(children: Children, program: str) -> tuple[asyncio.subprocess.Process, set[int]]:
    """The process, and all of its group once there are two."""
    process = await children.start(
        sys.executable, "-c", program, stderr=asyncio.subprocess.DEVNULL, env=dict(os.environ)
    )
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    assert set(members_of(process.pid)) == {process.pid, child}
    return process, {process.pid, child}


async def gone(process: asyncio.subprocess.Process) -> None:
    """Waits for the group to end: what is killed goes a little later."""
    await until(lambda: not members_of(process.pid))


async def test_one_that_ends_its_own_is_stopped_in_order() -> None:
    """Its exit status is told."""
    with Children() as children:
        process, _ = await start(children, family(END_CHILD))
        assert await children.stop(process, 20) == 0
        await gone(process)


async def test_one_that_leaves_a_process_behind_is_killed_with_it() -> None:
    """The status says that it was not in order: None."""
    with Children() as children:
        process, _ = await start(children, family(on_term_child=IGNORE))
        assert await children.stop(process, 0.5) is None
        await gone(process)


async def test_one_that_does_not_end_is_killed() -> None:
    """After the time that it was given."""
    with Children() as children:
        process, _ = await start(children, family(IGNORE, IGNORE))
        assert await children.stop(process, 0.2) is None
        await gone(process)


async def test_what_lives_at_the_end_is_killed_without_the_event_loop() -> None:
    """As after a second Ctrl-C."""
    with Children() as children:
        process, _ = await start(children, family(IGNORE, IGNORE))
    await process.wait()
    await gone(process)


@pytest.mark.parametrize("num_steps", range(8))
async def test_a_start_that_is_cancelled_ends_and_leaves_nobody(num_steps: int) -> None:
    """At whichever step of the event loop. asyncio's own start of a process never ends if it is cancelled before it has
    connected the pipes: none of it may be under way when the loop ends."""
    program = "import time; time.sleep(600)"
    before, others = asyncio.all_tasks(), psutil.Process().children()
    with Children() as children:
        starting = asyncio.create_task(
            children.start(
                sys.executable, "-c", program, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.PIPE,
                env=dict(os.environ),
            )
        )  # fmt: skip
        for _ in range(num_steps):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting], timeout=60)
        assert asyncio.all_tasks() == before
        started = set(psutil.Process().children()).difference(others)
    assert psutil.wait_procs(started, timeout=30)[1] == []


SHARING = """
import multiprocessing, os, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(memory.name, "sem." + semaphore._semlock.name.strip("/"), flush=True)
time.sleep(600)
"""


async def test_shared_memory_of_a_killed_child_is_removed() -> None:
    """Python's resource tracker does that, if it is left the time."""
    with Children() as children:
        process = await children.start(
            sys.executable, "-c", SHARING, stderr=asyncio.subprocess.DEVNULL, env=dict(os.environ)
        )
        assert process.stdout is not None
        names = (await process.stdout.readline()).decode().split()
        assert set(names) <= set(os.listdir("/dev/shm"))
        assert await children.stop(process, 0.0) is None
    assert not set(names) & set(os.listdir("/dev/shm"))


STARTER = """
import asyncio, os, signal, sys
from genserve.doctor.children import Children

async def main():
    children = Children()
    process = await children.start(
        sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)", stderr=2, env=os.environ
    )
    await process.stdout.readline()
    print(process.pid, flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_they_end_with_a_doctor_that_is_killed() -> None:
    """Which could end nobody."""
    doctor = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTER, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert doctor.stdout is not None
    started = psutil.Process(int(await doctor.stdout.readline()))
    doctor.kill()
    await doctor.wait()
    _, alive = psutil.wait_procs([started], timeout=30)
    for each in alive:
        each.kill()
    assert alive == []
