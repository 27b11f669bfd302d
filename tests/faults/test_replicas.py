"""Two data-parallel engines, of which one fails: vLLM answers for the first one alone."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from genserve.errors import DeadlineError, EngineSleepingError, PushRolledBackError
from tests.faults.forgetful_faulty_worker import FORGETFUL_FAULTY_EXTENSION
from tests.support.daemon_process import BOTH_CORES
from tests.support.faulty_worker import Fault
from tests.support.forgetful_worker import SLEEPS_VARIABLE
from tests.support.subject import Kept, Subject

LONG = pytest.mark.long("genserve/worker", "genserve/engine/vllm", "genserve/weights", "tests/support/faulty_worker.py")


@pytest.fixture(scope="module")
async def kept_engines(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kept]:
    """Of all tests here."""
    directory = tmp_path_factory.mktemp("engines")
    flags = ("--data-parallel-size", "2", "--worker-extension-cls", FORGETFUL_FAULTY_EXTENSION)
    env = {**BOTH_CORES, SLEEPS_VARIABLE: str(directory / "sleeps")}
    async with Kept(checkpoints, directory, *flags, env=env, num_engines=2) as daemons:
        yield daemons


@pytest.fixture
async def engines(kept_engines: Kept, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """A daemon with two engines."""
    async with kept_engines.for_one_test(request.session) as daemon:
        yield daemon


async def test_both_engines_serve_what_was_pushed(engines: Subject) -> None:
    """The control: digests and tokens of each engine, by its rank, are those of the version."""
    version = (await engines.push("b")).push.weight_version
    known = engines.oracle.known["b"]
    assert {rank.split(":")[0] for rank, _ in known.digests} == {"dp0", "dp1"}
    assert known.outputs[0] == known.outputs[1] != engines.oracle.known["a"].outputs[0]
    await engines.oracle.holds((version, "b"))


@pytest.mark.parametrize(
    ("step", "after", "rank"),
    [
        ("prepare", 0, "dp1"),
        ("load", 3, "dp1"),
        ("commit", 4, "dp0"),
        *(
            pytest.param(*each, marks=LONG)
            for each in (
                ("prepare", 0, "dp0"),
                ("load", 3, "dp0"),
                ("commit", 4, "dp1"),
                ("commit", -1, "dp0"),
                ("commit", -1, "dp1"),
            )
        ),
    ],
)
async def test_one_engine_that_raises_rolls_both_back(engines: Subject, step: str, after: int, rank: str) -> None:
    """Tokens of both engines are of the old version, by label and by likeness."""
    version = await engines.oracle.served_version()
    error = await engines.fails(PushRolledBackError, Fault(step, after=after, rank=rank))
    assert rank in error.message
    for data_parallel_rank in (0, 1):
        generation = await engines.client.generate(
            [1, 2, 3], max_tokens=5, ignore_eos=True, data_parallel_rank=data_parallel_rank
        )
        assert {span.version for span in generation.sequences[0].weight_spans} == {version}
    await engines.oracle.holds((version, "a"))


async def test_one_engine_that_cannot_roll_back_is_restored_with_the_other(engines: Subject) -> None:
    """The second tier, in both engines."""
    version = await engines.oracle.served_version()
    await engines.fails(
        PushRolledBackError, Fault("commit", after=2, rank="dp1"), Fault("rollback", after=1, rank="dp1")
    )
    await engines.oracle.holds((version, "a"))


async def woken(engines: Subject, version: int, name: str) -> None:
    """Both engines run, and forgot nothing that they need."""
    assert (await engines.client.status()).state.phase == "running"
    await engines.oracle.holds((version, name))


@pytest.mark.parametrize("level", [0, 2])
async def test_both_engines_sleep_and_serve_the_same_version_afterwards(engines: Subject, level: int) -> None:
    """Weights and keys of both are garbage in between, as far as the level drops them."""
    version = await engines.oracle.served_version()
    asleep = await engines.client.sleep(level=level)
    assert (asleep.phase, asleep.weights_discarded) == ("sleeping", level == 2)
    for data_parallel_rank in (0, 1):
        with pytest.raises(EngineSleepingError):
            await engines.client.generate([1], max_tokens=1, data_parallel_rank=data_parallel_rank)
    await engines.client.wake_up()
    await woken(engines, version, "a")


async def test_both_engines_take_a_push_between_the_weights_and_the_kv_cache(engines: Subject) -> None:
    """The step of a trainer that shares the GPUs."""
    await engines.client.sleep(level=1)
    assert (await engines.client.wake_up(["weights"])).asleep_tags == ["scheduling", "kv_cache"]
    version = (await engines.push("b")).push.weight_version
    await engines.client.wake_up(["kv_cache"])
    await woken(engines, version, "b")


async def test_one_engine_that_fails_over_dropped_weights_leaves_both_restorable(engines: Subject) -> None:
    """They stay dropped, and the wake-up restores the served version in both."""
    version = await engines.oracle.served_version()
    await engines.client.sleep(level=2)
    await engines.client.wake_up(["weights"])
    await engines.fails(PushRolledBackError, Fault("commit", after=2, rank="dp1"))
    assert (await engines.client.status()).state.weights_discarded
    await engines.client.wake_up()
    await woken(engines, version, "a")


async def test_pauses_that_are_given_up_leave_both_engines_running(engines: Subject) -> None:
    """One whose time is over, and one whose client goes, while an engine has a request that they wait for."""
    version = await engines.oracle.served_version()
    request = engines.client.generate([1, 2, 3], max_tokens=300, ignore_eos=True, data_parallel_rank=1)
    engines.order(Fault("run", "slow", seconds=0.2, times=-1))  # for a minute, unless it is released
    running = asyncio.create_task(request)
    while (await engines.client.status()).load.running == 0:
        await asyncio.sleep(0.02)
    with pytest.raises(DeadlineError):
        await engines.client.pause(mode="wait", timeout_s=1.0)
    pausing = asyncio.create_task(engines.client.pause(mode="wait", timeout_s=60.0))
    while (
        not pausing.done()
    ):  # requests that come wait behind the pause: one that gets no token shows that it has begun
        try:
            await engines.client.generate([1], max_tokens=1, data_parallel_rank=0, timeout_s=1.0)
        except DeadlineError:
            break
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    for data_parallel_rank in (0, 1):
        await engines.client.generate([1], max_tokens=2, ignore_eos=True, data_parallel_rank=data_parallel_rank)
    assert not running.done(), "nothing is proven about a pause that waits"
    engines.release()
    await running
    await woken(engines, version, "a")
