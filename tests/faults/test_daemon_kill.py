"""A daemon that is killed while it applies a push, and started again."""

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import psutil
import pytest

from genserve.errors import UnavailableError
from tests.support import patience
from tests.support.faulty_worker import Fault
from tests.support.footprint import Remains, tree
from tests.support.oracle import Likeness
from tests.support.subject import Subject, daemon_process, started

NUM_FRONTENDS = 2
LONG = pytest.mark.long("genserve/worker", "genserve/daemon", "genserve/frontends", "genserve/engine/vllm/start")
Steps = Sequence[tuple[str, Fault]]
STEPS: Steps = [
    ("b", Fault("load", "hang", after=5)),
    ("a", Fault("commit", "hang", after=4)),
    ("a", Fault("commit", "hang", after=-1)),
]
"""Checkpoint to start on next, and where the daemon before is killed: preparing, between two tensors of the exchange,
and with all of them exchanged and nobody told."""


async def killed(subject: Subject) -> None:
    """SIGKILLs the daemon alone, and waits until everything it had started is gone, with its shared memory: its front
    ends too."""
    assert len((await subject.client.server_info()).frontend_ports) == NUM_FRONTENDS
    remains = Remains(subject.pid)
    os.kill(subject.pid, signal.SIGKILL)
    subject.release()  # what hangs by order would hang for ever
    await asyncio.to_thread(subject.process.exit_status, 60)
    assert await remains.left() == []


@pytest.mark.timeout(600)  # it starts daemons, one after the other
@pytest.mark.parametrize(
    "steps", [pytest.param(STEPS[1:2], id="in the exchange"), pytest.param(STEPS, id="all", marks=LONG)]
)
async def test_a_daemon_killed_in_a_push_leaves_nothing_of_it(
    subject: Subject, checkpoints: dict[str, Path], tmp_path: Path, steps: Steps
) -> None:
    """No process, no shared memory; started again it serves version 0, with the digests of its checkpoint.

    One daemon after the other, on one checkpoint or the other: the restart after a kill is the victim of the next.
    """
    known = subject.oracle.known

    async def check(daemon: Subject, name: str) -> None:
        assert await daemon.oracle.served_version() == 0
        served = await daemon.client.get_weights(include_digests=True)
        assert Likeness(served.digests, known[name].outputs) == known[name]
        assert (await daemon.oracle.likeness()) == known[name]

    async with AsyncExitStack() as stack:

        async def start(number: int, name: str) -> Subject:
            swapped = {"a": checkpoints[name], "b": checkpoints["a" if name == "b" else "b"]}
            flags = ("--frontends", str(NUM_FRONTENDS))
            daemon = await stack.enter_async_context(started(swapped, tmp_path / str(number), *flags, begins=False))
            await check(daemon, name)
            return daemon

        victim = await start(0, "a")
        for number, (name, fault) in enumerate(steps, 1):
            victim.order(fault)
            push = asyncio.create_task(victim.push("b"))
            await victim.until_fired()
            await killed(victim)
            push.cancel()
            with suppress(asyncio.CancelledError, UnavailableError):
                await push
            victim = await start(number, name)
        await victim.oracle.push("b")
        assert await victim.oracle.likeness() == known["b"]
    await subject.oracle.holds((await subject.oracle.served_version(), "a"))  # another daemon is not harmed


def command_of(process: psutil.Process) -> str:
    """ "" if it has ended meanwhile, as those do that look at the machine."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.parametrize("youngest", ["multiprocessing.spawn", pytest.param("VLLM::Worker", marks=LONG)])
async def test_a_daemon_killed_while_its_engine_starts_leaves_nothing_of_it(
    checkpoints: dict[str, Path], tmp_path: Path, youngest: str
) -> None:
    """Its processes do not wait to be attached: from their beginning on they end with it. EngineCore would wait minutes
    for its first message, without a worker."""
    daemon = daemon_process(checkpoints["a"], tmp_path, cold=True)
    began = lambda: any(youngest in command_of(process) for process in tree(daemon.process.pid))  # noqa: E731
    await patience.until(began, patience.START_S)
    remains = Remains(daemon.process.pid)
    os.kill(daemon.process.pid, signal.SIGKILL)
    await asyncio.to_thread(daemon.exit_status, 60)
    assert await remains.left() == []
