"""When a rollback fails as well: nothing is served that nobody knows, and a push heals it. And a commit that hangs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from genserve.client import AsyncClient, Generation
from genserve.errors import (
    DeadlineError,
    EngineDeadError,
    EngineTaintedError,
    UnavailableError,
)
from tests.support import faulty_worker
from tests.support.faulty_worker import SLOW_RUN, Fault
from tests.support.footprint import Remains
from tests.support.subject import Kept, Subject
from tests.support.unchanging import unchanging

LONG = pytest.mark.long("genserve/weights", "genserve/control", "genserve/worker", "genserve/engine/vllm")


@pytest.fixture(scope="module")
async def kept_forgetful(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kept]:
    """Of all tests here."""
    async with Kept(checkpoints, tmp_path_factory.mktemp("forgetful"), "--no-resident-weights") as daemons:
        yield daemons


@pytest.fixture
async def forgetful(kept_forgetful: Kept, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """A daemon that keeps no bytes of what it serves."""
    async with kept_forgetful.for_one_test(request.session) as daemon:
        yield daemon


async def taints(daemon: Subject, *faults: Fault) -> None:
    """A push that cannot be undone: the engine stands still until a full push heals it."""
    version = await daemon.oracle.served_version()
    generation, begun = Generation(), asyncio.Event()

    async def stream() -> None:
        async for delta in daemon.client.stream([9, 8, 7], temperature=0.0, max_tokens=200, ignore_eos=True):
            generation.add(delta)
            begun.set()

    daemon.order(SLOW_RUN)
    streaming = asyncio.create_task(stream())
    await begun.wait()
    daemon.order(SLOW_RUN, *faults)
    with pytest.raises(EngineTaintedError):
        await daemon.push("b")
    assert not faulty_worker.unfired(daemon.faults)
    assert (await daemon.client.status()).state.phase == "tainted"
    assert not await daemon.is_serving()
    with pytest.raises(EngineTaintedError):
        await daemon.client.generate([1, 2], max_tokens=1)
    # A pause and its end, and even a forced one, do not let it run.
    await daemon.client.resume(force=True)
    num_tokens = await unchanging(lambda: len(generation.token_ids))
    assert (await daemon.client.status()).state.phase == "tainted"
    daemon.release()
    assert len(generation.token_ids) == num_tokens and not streaming.done()
    healed = version + 2
    await daemon.push("b", version=healed)
    assert await daemon.is_serving()
    await streaming
    assert len(generation.token_ids) == 200
    assert [span.version for span in generation.sequences[0].weight_spans] == [version, healed]
    await daemon.oracle.holds((healed, "b"))


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(Fault("prepare", skip=1, times=-1), id="prepare", marks=LONG),
        pytest.param(Fault("load", after=2, skip=1, times=-1), id="load"),
        pytest.param(Fault("commit", after=0, skip=1), id="commit"),
    ],
)
async def test_an_engine_that_cannot_be_restored_is_tainted_until_a_push(subject: Subject, again: Fault) -> None:
    """Neither the exchange back nor the resident bytes: the label is not to be trusted, so nothing is served."""
    await taints(subject, Fault("commit", after=5), Fault("rollback", after=2, times=-1), again)


@LONG  # test_frontends has this at several ports
async def test_without_resident_weights_a_failing_rollback_taints_at_once(forgetful: Subject) -> None:
    """There is nothing to apply anew."""
    await taints(forgetful, Fault("commit", after=5), Fault("rollback", after=2))


@LONG  # test_frontends has this at several ports
async def test_a_commit_that_hangs_ends_in_time_and_so_does_the_daemon(forgetful: Subject) -> None:
    """DEADLINE_EXCEEDED, streams are told, the exit status says failure, and nothing is left. The last test of it."""
    remains = Remains(forgetful.pid)
    async with AsyncClient(forgetful.process.address) as client:
        stream = client.stream([1, 2, 3], max_tokens=1900, ignore_eos=True)
        await anext(stream)
        forgetful.order(SLOW_RUN, Fault("commit", "hang", after=3))
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlineError):
            await forgetful.push("b", apply_timeout_s=5.0)
        took_s = asyncio.get_running_loop().time() - began_s
        assert not faulty_worker.unfired(forgetful.faults)
        assert 4.0 < took_s < 45.0
        with pytest.raises((EngineDeadError, UnavailableError)):
            async for _ in stream:
                pass
    assert await asyncio.to_thread(forgetful.process.exit_status, 60) != 0
    assert await remains.left() == [], "the one that hangs perhaps"
