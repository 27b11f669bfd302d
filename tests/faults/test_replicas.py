"""Two data-parallel engines, of which one fails: vLLM answers for the first one alone."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from genserve.errors import PushRolledBackError
from tests.faults.faulty_worker import Fault
from tests.faults.subject import BOTH_CORES, Kept, Subject


@pytest.fixture(scope="module")
async def kept_engines(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kept]:
    """Of all tests here."""
    async with Kept(
        checkpoints, tmp_path_factory.mktemp("engines"), "--data-parallel-size", "2", env=BOTH_CORES, num_engines=2
    ) as daemons:
        yield daemons


@pytest.fixture
async def engines(kept_engines: Kept) -> AsyncIterator[Subject]:
    """A daemon with two engines."""
    async with kept_engines.for_one_test() as daemon:
        yield daemon


async def test_both_engines_serve_what_was_pushed(engines: Subject) -> None:
    """The control: digests and tokens of each engine, by its rank, are those of the version."""
    version = (await engines.push("b")).push.weight_version
    known = engines.oracle.known["b"]
    assert {rank.split(":")[0] for rank, _ in known.digests} == {"dp0", "dp1"}
    assert known.outputs[0] == known.outputs[1] != engines.oracle.known["a"].outputs[0]
    await engines.oracle.holds((version, "b"))


@pytest.mark.parametrize("rank", ["dp0", "dp1"])
@pytest.mark.parametrize(("step", "after"), [("prepare", 0), ("load", 3), ("commit", 4), ("commit", -1)])
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
