"""Every driver of clients/conformance over every scenario, and mistakes of daemons and drivers that it must show."""

import sys
from collections.abc import AsyncIterator, Sequence

import pytest

from clients.conformance.runner import checkpoints
from clients.conformance.runner.daemons import Daemons, running
from clients.conformance.runner.drivers import CLIENTS, DRIVERS
from clients.conformance.runner.run import Run, subject_of
from clients.conformance.runner.scenario import Scenario, all_scenarios
from clients.conformance.runner.subject import Subject
from genserve.client import AsyncClient
from tests.engine import wrong_driver

Tested = tuple[Daemons, Subject, dict[str, str]]

SHOWN = {
    "field": ("generate-many", "push-version-mismatch"),
    "reason": ("push-version-mismatch", "several-sequences"),
    "span": ("several-sequences", "push-version-mismatch"),
}
"""A scenario that each mistake must fail, and one that it must not."""
TYPESCRIPT = (CLIENTS / "typescript/node_modules").is_dir()


@pytest.fixture(scope="module")
async def tested(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tested]:
    directory = tmp_path_factory.mktemp("conformance")
    paths = checkpoints.make(directory)
    with running(paths["a"], directory) as daemons:
        async with subject_of(daemons, paths) as subject:
            yield daemons, subject, paths


@pytest.fixture(scope="module")
def drivers() -> dict[str, Sequence[str]]:
    """All of them. That of TypeScript needs the packages that scripts/typescript installs: CI runs it before."""
    return {name: command for name, command in DRIVERS.items() if TYPESCRIPT or name != "typescript"}


@pytest.mark.skipif(not TYPESCRIPT, reason="run scripts/typescript: it installs the packages of this driver")
def test_the_typescript_client_takes_part(drivers: dict[str, Sequence[str]]) -> None:
    assert "typescript" in drivers


@pytest.mark.parametrize("scenario", all_scenarios(), ids=lambda scenario: str(scenario.name))
async def test_all_clients_do_what_a_scenario_says(
    tested: Tested, drivers: dict[str, Sequence[str]], scenario: Scenario
) -> None:
    outcomes = await Run(*tested, mutation=None).scenario(scenario, drivers)
    assert {name: outcome.differences for name, outcome in outcomes.items()} == {name: [] for name in drivers}


@pytest.mark.parametrize("mutation", SHOWN)
async def test_a_mistake_of_a_daemon_shows_in_every_column(
    tested: Tested, drivers: dict[str, Sequence[str]], mutation: str
) -> None:
    known = {scenario.name: scenario for scenario in all_scenarios()}
    run = Run(*tested, mutation=mutation)
    shown, hidden = SHOWN[mutation]
    outcomes = await run.scenario(known[shown], drivers)
    assert [name for name, outcome in outcomes.items() if not outcome.differences] == []
    outcomes = await run.scenario(known[hidden], drivers)
    assert [name for name, outcome in outcomes.items() if outcome.differences] == []


@pytest.mark.parametrize("mistake", wrong_driver.MISTAKES)
async def test_a_mistake_of_a_driver_shows_without_another_one_beside_it(tested: Tested, mistake: str) -> None:
    name, _ = wrong_driver.MISTAKES[mistake]
    scenario = next(each for each in all_scenarios() if each.name == name)
    command = sys.executable, str(wrong_driver.__file__), mistake
    outcome = (await Run(*tested, mutation=None).scenario(scenario, {"wrong": command}))["wrong"]
    assert outcome.differences and outcome.results, outcome  # it ran to its end


async def test_what_a_driver_leaves_paused_fails_its_own_row_alone(tested: Tested) -> None:
    """The next driver finds a daemon that generates."""
    daemons, subject, _ = tested
    async with AsyncClient(daemons.open) as client:
        await client.pause(holder="forgetful", ttl_s=1000)
        assert await subject.differences({}) == ["afterwards 'forgetful' holds a pause"]
        assert (await client.status()).state.phase == "running"
