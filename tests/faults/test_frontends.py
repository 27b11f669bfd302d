"""What faults mean for the requests of front ends: one daemon with three of them, whose engine dies at the end.

tests/engine/test_frontends.py has pauses, aborts, labels across pushes, and a front end that is killed or stands still
while nothing is pushed. Their shutdown is in test_shutdown.py, the death of the daemon in test_daemon_kill.py.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import psutil
import pytest

from genserve.client import Generation
from genserve.errors import (
    DeadlineError,
    EngineDeadError,
    EngineSleepingError,
    EngineTaintedError,
    GenserveError,
    NotResidentError,
    PushRolledBackError,
    UnavailableError,
)
from tests.support import faulty_worker, patience
from tests.support.faulty_worker import SLOW_RUN, Fault
from tests.support.footprint import Remains
from tests.support.frontends import PortClient, everywhere_of, on_port, running
from tests.support.subject import Subject, started
from tests.support.unchanging import unchanging

NUM_FRONTENDS = 3
SLOWER_RUN = Fault("run", "slow", seconds=0.2, times=-1)
"""300 tokens take a minute, in which a front end starts, unless it is released."""
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"


@pytest.fixture(scope="module")
async def daemon(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    """Of all tests here. It keeps no bytes of what it serves, so that a rollback that fails taints it."""
    flags = ("--no-resident-weights", "--frontends", str(NUM_FRONTENDS))
    async with started(checkpoints, tmp_path_factory.mktemp("daemon"), *flags, begins=False) as subject:
        yield subject


@pytest.fixture(scope="module")
async def everywhere(daemon: Subject) -> AsyncIterator[Sequence[PortClient]]:
    """A client of the daemon's own port, and one of each front end."""
    async with everywhere_of(daemon.process.address, NUM_FRONTENDS) as clients:
        yield clients


async def health(clients: Sequence[PortClient]) -> set[bytes]:
    """What the health checks say."""
    async with AsyncExitStack() as stack:
        said = set()
        for port in (each.port for each in clients):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
            check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
            said.add(await check(b"", timeout=60))
        return said


async def refused(clients: Sequence[PortClient], error: type[GenserveError]) -> None:
    """No port takes a request, by either call."""
    for each in clients:
        with pytest.raises(error):
            await each.generate([1, 2], max_tokens=1)
        with pytest.raises(error):
            await each.generate_many([[1, 2]], max_tokens=1)


async def until_hanging(daemon: Subject) -> None:
    """Waits until every fault that is ordered has happened, the last of which hangs."""
    await patience.until(lambda: not faulty_worker.unfired(daemon.faults))


def versions(generation: Generation) -> list[int]:
    """Those that a request lived under."""
    return [span.version for span in generation.sequences[0].weight_spans]


async def test_without_resident_weights_nothing_is_pulled_or_completed(daemon: Subject) -> None:
    """And a rollback without a second fault works as ever."""
    served = await daemon.client.get_weights(include_digests=True)
    assert not served.resident
    with pytest.raises(NotResidentError):
        await daemon.client.pull_weights()
    await daemon.fails(PushRolledBackError, Fault("commit", after=5))
    now = await daemon.client.get_weights(include_digests=True)
    assert (now.weight_version, now.digests) == (served.weight_version, served.digests)


async def test_a_tainted_engine_serves_nobody_until_a_push_heals_it(
    daemon: Subject, everywhere: Sequence[PortClient]
) -> None:
    """Every port refuses and says NOT_SERVING from the moment that the trainer is told. Streams stand still, and go on
    under the version that heals."""
    version = await daemon.oracle.served_version()
    daemon.order(SLOW_RUN)
    async with running(everywhere, max_tokens=200) as tasks:
        daemon.order(SLOW_RUN, Fault("commit", after=5), Fault("rollback", after=2))
        with pytest.raises(EngineTaintedError):
            await daemon.push("b")
        await refused(everywhere, EngineTaintedError)
        assert await health(everywhere) == {_NOT_SERVING}
        assert not any(task.done() for task in tasks)
        daemon.release()
        await daemon.push("b", version=version + 2)
        assert await health(everywhere) == {_SERVING}
        for each in everywhere:
            await each.generate([1], max_tokens=1, min_weight_version=version + 2)
        for generation in await asyncio.gather(*tasks):
            assert versions(generation) == [version, version + 2]


async def test_a_sleeping_engine_serves_nobody(daemon: Subject, everywhere: Sequence[PortClient]) -> None:
    """Streams are frozen, and continue when it wakes up."""
    daemon.order(SLOW_RUN)
    async with running(everywhere, max_tokens=200) as tasks:
        await daemon.client.sleep()
        await refused(everywhere, EngineSleepingError)
        assert await health(everywhere) == {_NOT_SERVING}
        assert not any(task.done() for task in tasks)
        daemon.release()
        await daemon.client.wake_up()
        assert await health(everywhere) == {_SERVING}
        for generation in await asyncio.gather(*tasks):
            assert len(generation.token_ids) == 200


async def test_a_front_end_that_stands_still_holds_up_no_push(
    daemon: Subject, everywhere: Sequence[PortClient]
) -> None:
    """Neither is it killed: a KEEP push does not ask it. When it goes on, its tokens have the labels under which they
    were sampled."""
    victim = on_port(daemon.process, everywhere[1].port)
    daemon.order(SLOW_RUN)
    async with running(everywhere, max_tokens=200) as tasks:
        victim.suspend()
        try:
            applied = await daemon.push("a")
        finally:
            victim.resume()
        daemon.release()
        pushed = applied.push.weight_version
        for generation in await asyncio.gather(*tasks):
            assert versions(generation) == [pushed - 1, pushed]
    assert victim.is_running()


@pytest.mark.parametrize("step", [pytest.param("load", marks=pytest.mark.long("genserve/frontends")), "commit"])
async def test_a_front_end_that_is_killed_amid_a_push_takes_nothing_along(
    daemon: Subject, everywhere: Sequence[PortClient], step: str
) -> None:
    """Not the push, nor a stream of another. The next one joins at once, whatever the engine is doing. Nothing of the
    first is left in the engine."""
    victim, others = everywhere[2], [*everywhere[:2], everywhere[3]]
    process = on_port(daemon.process, victim.port)
    daemon.order(SLOWER_RUN)
    async with running(others, max_tokens=300) as tasks, running([victim] * 3) as lost:
        daemon.order(SLOWER_RUN, Fault(step, "hang", after=2))
        pushing = asyncio.create_task(daemon.push("b" if step == "load" else "a"))
        await until_hanging(daemon)
        process.kill()
        for error in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(error, UnavailableError)
        await victim.wait_ready()
        assert not pushing.done()
        assert not any(task.done() for task in tasks)
        daemon.order(SLOWER_RUN)
        pushed = (await pushing).push.weight_version
        for each in others:
            await each.generate([1], max_tokens=1, min_weight_version=pushed)
        daemon.release()
        for task in tasks:
            assert versions(await task) == [pushed - 1, pushed]
    async with asyncio.timeout(patience.STEP_S):
        while (await daemon.client.status()).load.running:
            await asyncio.sleep(0.02)
    assert versions(await victim.generate([1], max_tokens=1, min_weight_version=pushed)) == [pushed]


async def test_front_ends_that_die_leave_no_descriptor_behind(
    daemon: Subject, everywhere: Sequence[PortClient]
) -> None:
    """In the daemon, and in the process that they are forked from. The control is how many there are of one."""
    owner = psutil.Process(daemon.pid)
    victim = on_port(daemon.process, everywhere[3].port)
    template = victim.parent()
    assert template is not None and template.parent() == owner
    # Those of the front end that was killed before are on their way.
    before = await unchanging(lambda: (owner.num_fds(), template.num_fds()))
    assert template.num_fds() >= NUM_FRONTENDS
    victim.kill()
    await everywhere[3].wait_ready(timeout_s=120)
    await patience.until(lambda: (owner.num_fds(), template.num_fds()) == before)


async def test_an_engine_that_dies_ends_the_streams_of_all(daemon: Subject, everywhere: Sequence[PortClient]) -> None:
    """A commit that hangs: each stream is told that the engine is dead, by whichever process; nothing is left. The last
    test of this daemon."""
    remains = Remains(daemon.pid)
    daemon.order(SLOW_RUN)
    async with running(everywhere) as tasks:
        daemon.order(SLOW_RUN, Fault("commit", "hang", after=3))
        with pytest.raises(DeadlineError):
            await daemon.push("b", apply_timeout_s=5.0)
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, EngineDeadError), error
    assert await asyncio.to_thread(daemon.process.exit_status, 60) != 0
    assert await remains.left() == []
