"""The same faults where live tensors have to stay where they are, as on a GPU: contents change places, through a buffer
for the largest tensor, and nothing is allocated for it. The workers run on the CPU, with a heap that is frozen."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from genserve.errors import PushRolledBackError
from tests.support.faulty_worker import KEEP_ADDRESSES_VARIABLE, Fault
from tests.support.subject import Kept, Subject

pytestmark = pytest.mark.long(
    "genserve/worker/update",
    "genserve/worker/versions.py",
    "genserve/worker/extension.py",
    "tests/support/faulty_worker.py",
)


@pytest.fixture(scope="module")
async def kept_addresses(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kept]:
    """Of all tests here."""
    directory, env = tmp_path_factory.mktemp("addresses"), {KEEP_ADDRESSES_VARIABLE: "1"}
    async with Kept(checkpoints, directory, "--weight-update", "beside", env=env) as daemons:
        yield daemons


@pytest.fixture
async def addressed(kept_addresses: Kept, request: pytest.FixtureRequest) -> AsyncIterator[Subject]:
    """A daemon that keeps addresses."""
    async with kept_addresses.for_one_test(request.session) as daemon:
        yield daemon


async def test_pushes_are_exact(addressed: Subject) -> None:
    """The oracle pushes b and a."""
    await addressed.oracle.holds((await addressed.oracle.served_version(), "a"))


@pytest.mark.parametrize("after", [0, 1, 2, 3, 10, 11, 12, -1])
async def test_a_copy_that_fails_leaves_the_old_version_live(addressed: Subject, after: int) -> None:
    """The first, second or third one of a tensor, and the end of all. What was under way is undone as well."""
    version = await addressed.oracle.served_version()
    await addressed.fails(PushRolledBackError, Fault("commit", after=after))
    await addressed.oracle.holds((version, "a"))


@pytest.mark.parametrize(("step", "after"), [("load", 3), ("commit", 5)])
async def test_memory_that_runs_out_leaves_the_old_version_live(addressed: Subject, step: str, after: int) -> None:
    """While a version is built, or in the middle of its exchange; the message has torch's name for it."""
    version = await addressed.oracle.served_version()
    error = await addressed.fails(PushRolledBackError, Fault(step, "oom", after=after))
    assert "OutOfMemoryError" in error.message
    await addressed.oracle.holds((version, "a"))
