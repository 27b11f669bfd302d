"""The same faults where versions are loaded in place: what a commit replaced is gone, and has to come from the resident
bytes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from genserve.errors import DeadlineError, PushRolledBackError
from tests.support.faulty_worker import Fault
from tests.support.subject import Kept, Subject


@pytest.fixture(scope="module")
async def kept_inplace(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kept]:
    """Of all tests here."""
    async with Kept(checkpoints, tmp_path_factory.mktemp("inplace"), "--weight-update", "inplace") as daemons:
        yield daemons


@pytest.fixture
async def inplace(kept_inplace: Kept, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """A daemon that loads in place."""
    async with kept_inplace.for_one_test(request.session) as daemon:
        yield daemon


async def test_pushes_in_place_are_exact(inplace: Subject) -> None:
    """The oracle pushes b and a; both have the digests of pushes beside, and of a cold start."""
    assert (await inplace.client.server_info()).weight_update == "inplace"
    await inplace.oracle.holds((await inplace.oracle.served_version(), "a"))


LONG = pytest.mark.long("genserve/worker/update", "genserve/weights", "tests/support/faulty_worker.py")


@pytest.mark.parametrize(("step", "after"), [("load", 5), ("prepare", -1), pytest.param("load", -1, marks=LONG)])
async def test_a_rehearsal_that_fails_has_touched_nothing(inplace: Subject, step: str, after: int) -> None:
    """Before any pause."""
    version = await inplace.oracle.served_version()
    error = await inplace.fails(PushRolledBackError, Fault(step, after=after))
    assert "nothing changed" in error.message  # and not healed, which the oracle could not tell
    await inplace.oracle.holds((version, "a"))


@pytest.mark.parametrize("after", [7, -1, pytest.param(0, marks=LONG)])
async def test_a_commit_that_fails_is_healed_from_the_resident_bytes(inplace: Subject, after: int) -> None:
    """In the same pause; before the first push they are the checkpoint's files, afterwards an arena."""
    version = await inplace.oracle.served_version()
    error = await inplace.fails(PushRolledBackError, Fault("commit", after=after))
    assert "applied again" in error.message  # and was not exchanged back
    await inplace.oracle.holds((version, "a"))


async def test_a_commit_that_succeeds_late_stays(inplace: Subject) -> None:
    """Nothing is left to go back to: the trainer is told that it is late, and GetPush what became of it."""
    version = await inplace.oracle.served_version()
    inplace.order(Fault("commit", "slow", after=-1, seconds=4.5))
    with pytest.raises(DeadlineError):
        await inplace.push("b", push_id="late and applied", apply_timeout_s=3.0)
    await inplace.until_push("late and applied", state="applied")
    inplace.release()
    await inplace.oracle.holds((version + 1, "b"))
