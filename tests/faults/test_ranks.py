"""Two tensor-parallel ranks, of which one fails."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from genserve.errors import EngineDeadError, GenserveError, PushRolledBackError, UnavailableError
from genserve.process.leftovers import sweep_shared_memory
from tests.support.daemon_process import BOTH_CORES
from tests.support.faulty_worker import Fault
from tests.support.footprint import Remains
from tests.support.oracle import MAX_TOKENS
from tests.support.plain_vllm import PROMPTS
from tests.support.subject import Kept, Subject, started

NUM_ROUNDS = 4
LONG = pytest.mark.long("genserve/worker", "genserve/engine/vllm", "genserve/weights", "tests/support/faulty_worker.py")


@pytest.fixture(scope="module")
async def kept_ranks(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kept]:
    """Of all tests here."""
    async with Kept(
        checkpoints, tmp_path_factory.mktemp("ranks"), "--tensor-parallel-size", "2", env=BOTH_CORES
    ) as daemons:
        yield daemons


@pytest.fixture
async def ranks(kept_ranks: Kept, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """A daemon with two ranks."""
    async with kept_ranks.for_one_test(request.session) as daemon:
        yield daemon


async def each_call_gets_its_own_reply(daemon: Subject, name: str) -> None:
    """Calls of four kinds in turn, each with an answer that no other kind has: one that got the reply of the call
    before it would show, and so would all after it."""
    known = daemon.oracle.known[name]
    for number in range(NUM_ROUNDS):
        served = await daemon.client.get_weights(include_digests=True)
        assert served.digests == known.digests, f"round {number}"
        assert {rank for rank, _ in served.digests} == {"dp0:pp0:pcp0:tp0", "dp0:pp0:pcp0:tp1"}
        assert await daemon.client.reset_cache() is True
        generation = await daemon.client.generate(
            PROMPTS[0], temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, timeout_s=90.0
        )
        assert generation.token_ids == known.outputs[0][0]
        async with daemon.client.paused() as lease:
            assert lease.lease_id


@pytest.mark.parametrize("rank", [pytest.param("tp0", marks=LONG), "tp1"])
async def test_one_rank_that_cannot_prepare_leaves_neither_prepared(ranks: Subject, rank: str) -> None:
    """PREPARE is of all ranks or none; the next commit prepares anew on both."""
    version = await ranks.oracle.served_version()
    push_id = f"not on {rank}"
    ranks.order(Fault("load", after=3, rank=rank))
    with pytest.raises(PushRolledBackError, match=rank):
        await ranks.push("b", action="prepare", push_id=push_id)
    ranks.release()
    assert (await ranks.client.get_push(push_id)).push.state == "failed"
    await ranks.client.commit_push(push_id)
    await ranks.oracle.holds((version + 1, "b"))


@pytest.mark.parametrize(
    ("step", "after", "rank"),
    [
        ("prepare", 0, "tp1"),
        ("commit", 4, "tp0"),
        ("commit", -1, "tp1"),
        *(
            pytest.param(*each, marks=LONG)
            for each in (
                ("prepare", 0, "tp0"),
                ("load", 3, "tp0"),
                ("load", 3, "tp1"),
                ("load", -1, "tp0"),
                ("load", -1, "tp1"),
                ("commit", 4, "tp1"),
                ("commit", -1, "tp0"),
            )
        ),
    ],
)
async def test_one_rank_that_raises_rolls_both_back(ranks: Subject, step: str, after: int, rank: str) -> None:
    """PUSH_ROLLED_BACK names the rank; the other one has what it had, too."""
    version = await ranks.oracle.served_version()
    error = await ranks.fails(PushRolledBackError, Fault(step, after=after, rank=rank))
    assert rank in error.message
    await ranks.oracle.holds((version, "a"))


@pytest.mark.parametrize(
    ("step", "rank"),
    [
        ("prepare", "tp0"),
        ("commit", "tp1"),
        pytest.param("prepare", "tp1", marks=LONG),
        pytest.param("commit", "tp0", marks=LONG),
    ],
)
async def test_replies_that_come_late_are_nobody_elses(ranks: Subject, step: str, rank: str) -> None:
    """One rank fails at once while the other one is slow: the calls after it get their own replies."""
    version, other = await ranks.oracle.served_version(), {"tp0": "tp1", "tp1": "tp0"}[rank]
    await ranks.fails(
        PushRolledBackError,
        Fault(step, after=-1, rank=rank),
        Fault(step, "slow", after=-1, rank=other, seconds=0.3),
    )
    await each_call_gets_its_own_reply(ranks, "a")
    await ranks.oracle.holds((version, "a"))


async def test_one_rank_that_cannot_roll_back_is_restored_with_the_other(ranks: Subject) -> None:
    """The second tier, on both ranks."""
    version = await ranks.oracle.served_version()
    await ranks.fails(PushRolledBackError, Fault("commit", after=2, rank="tp1"), Fault("rollback", after=1, rank="tp1"))
    await ranks.oracle.holds((version, "a"))


async def test_an_exception_that_escapes_a_rank_is_the_end_of_the_engine(ranks: Subject) -> None:
    """vLLM would read the other rank's reply, which comes late, as that to the next call: told as UNAVAILABLE, and the
    daemon exits with 1. The last test of the daemon that all have had until here."""
    remains = Remains(ranks.pid)
    ranks.order(
        Fault("commit", "slow", after=0, rank="tp0", seconds=1.5),  # the other one has begun when it escapes
        Fault("commit", "escape", after=-1, rank="tp0"),
        Fault("commit", "slow", after=-1, rank="tp1", seconds=1.0),
    )
    with pytest.raises(EngineDeadError):
        await ranks.push("b")
    assert await asyncio.to_thread(ranks.process.exit_status, 60) == 1
    ranks.release()
    await nothing_is_left(remains)


async def nothing_is_left(remains: Remains) -> None:
    """No process; and of files only the kind of vLLM's that a killed rank leaves, which the next daemon sweeps."""
    await remains.left()
    await asyncio.to_thread(sweep_shared_memory, min_age_s=0.0)
    assert await remains.left() == []


@pytest.fixture
async def doomed(checkpoints: dict[str, Path], tmp_path: Path) -> AsyncIterator[Subject]:
    """A daemon with two ranks for one test, which ends it."""
    flags = ("--tensor-parallel-size", "2")
    async with started(checkpoints, tmp_path, *flags, env=BOTH_CORES, begins=False) as daemon:
        yield daemon


async def test_a_rank_that_is_killed_is_the_end_of_the_engine(doomed: Subject) -> None:
    """SIGKILL: a stream and a call that waits are told, the daemon exits with 1, and nothing is left."""
    remains = Remains(doomed.pid)
    stream = doomed.client.stream([1, 2, 3], max_tokens=1900, ignore_eos=True)
    await anext(stream)
    pending = asyncio.create_task(doomed.client.pause(mode="wait", timeout_s=60.0))
    workers = psutil.Process(doomed.process.descendant("EngineCore").pid).children()
    (killed,) = [each for each in workers if "TP1" in each.name() or "TP1" in "".join(each.cmdline())]
    killed.kill()
    with pytest.raises((EngineDeadError, UnavailableError)):
        async for _ in stream:
            pass
    with pytest.raises((EngineDeadError, UnavailableError)):
        await pending
    assert await asyncio.to_thread(doomed.process.exit_status, 60) == 1
    await nothing_is_left(remains)


async def test_last_line_names_the_exception_of_the_rank_whose_step_failed(doomed: Subject) -> None:
    """Nothing of the engine is written after it, and the client is told that the engine is dead."""
    doomed.order(Fault("run", "escape", rank="tp0"))
    with pytest.raises((EngineDeadError, UnavailableError)):
        await doomed.client.generate([1, 2, 3], max_tokens=4)
    assert await asyncio.to_thread(doomed.process.exit_status, 60) == 1
    doomed.release()
    last = doomed.process.stderr.splitlines()[-1]
    assert last == "genserve: the engine has died: LookupError: ordered to fail in run after 0"


@LONG  # tests/unit/engine/vllm/test_dead_engine.py has each call alone
@pytest.mark.parametrize(("step", "after"), [("prepare", 0), ("load", 3), ("commit", 2)])
async def test_push_that_kills_a_rank_is_not_reported_as_changing_nothing(
    doomed: Subject, step: str, after: int
) -> None:
    """Whatever the trainer is told, it is told by somebody who has died; and the last line says how."""
    doomed.order(Fault(step, "kill", after=after, rank="tp1"))
    with pytest.raises((EngineDeadError, UnavailableError)):
        await doomed.push("b")
    assert await asyncio.to_thread(doomed.process.exit_status, 60) == 1
    doomed.release()
    last = doomed.process.stderr.splitlines()[-1]
    assert last.startswith("genserve: the engine has died: Worker proc VllmWorker-1 died unexpectedly")


@LONG  # test_daemon_kill has this with one rank
@pytest.mark.usefixtures("impatient")
async def test_a_daemon_of_two_ranks_killed_in_a_commit_leaves_nothing(doomed: Subject) -> None:
    """One rank has exchanged, the other has not."""
    remains = Remains(doomed.pid)
    assert remains.files, "two ranks share memory by name: without it this shows nothing"
    doomed.order(Fault("commit", "hang", after=3, rank="tp1"))
    push = asyncio.create_task(doomed.push("b"))
    await doomed.until_fired()
    os.kill(doomed.pid, signal.SIGKILL)
    with pytest.raises(GenserveError):
        await push
    doomed.release()
    await asyncio.to_thread(doomed.process.exit_status, 60)
    await nothing_is_left(remains)
