"""Every driver of clients/conformance over every scenario, and mistakes of daemons and drivers that it must show."""

import sys
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from clients.conformance.runner.daemons import Daemons, running
from clients.conformance.runner.drivers import CLIENTS, DRIVERS
from clients.conformance.runner.mutations import MUTATIONS
from clients.conformance.runner.run import Run
from clients.conformance.runner.scenario import Scenario, all_scenarios
from clients.conformance.runner.subject import Subject
from genserve.client import AsyncClient
from tests.engine import wrong_driver

SHOWN = {
    "usage": ("generate-many", "push-version-mismatch"),
    "reason": ("push-version-mismatch", "several-sequences"),
    "span": ("several-sequences", "push-version-mismatch"),
    "request-id": ("generate", None),
    "prompt": ("stream", None),
    "length": ("stream", None),
    "received-bytes": ("push", None),
    "active-version": ("push", None),
}
"""A scenario that each mistake must fail, and perhaps one that it must not."""
LONG = pytest.mark.long("clients/conformance", "tests/engine/wrong_driver.py")
"""What proves the scenarios and their runner, and nothing of the daemon, but for one case of each."""
CALLS = pytest.mark.long("clients", "protos", "genserve/client", "genserve/transport", "genserve/wire", "genserve/rpc")
"""Every scenario with every driver. Two of them show every day that the three clients and the daemon fit."""
TYPESCRIPT = (CLIENTS / "typescript/node_modules").is_dir()


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    with running(tmp_path_factory.mktemp("conformance")) as daemons:
        yield daemons


@pytest.fixture(scope="module")
async def run(daemons: Daemons) -> AsyncIterator[Run]:
    async with Run.against(daemons) as against_daemons:
        yield against_daemons


@pytest.fixture(scope="module")
def drivers() -> dict[str, Sequence[str]]:
    """All of them. That of TypeScript needs the packages that scripts/typescript installs: CI runs it before."""
    return {name: command for name, command in DRIVERS.items() if TYPESCRIPT or name != "typescript"}


@pytest.mark.skipif(not TYPESCRIPT, reason="run scripts/typescript: it installs the packages of this driver")
def test_the_typescript_client_takes_part(drivers: dict[str, Sequence[str]]) -> None:
    assert "typescript" in drivers


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(each, id=each.name, marks=() if each.name in ("generate", "push") else CALLS)
        for each in all_scenarios()
    ],
)
async def test_all_clients_do_what_a_scenario_says(
    run: Run, drivers: dict[str, Sequence[str]], scenario: Scenario
) -> None:
    outcomes = await run.scenario(scenario, drivers)
    assert {name: outcome.differences for name, outcome in outcomes.items()} == {name: [] for name in drivers}


@pytest.mark.parametrize("mutation", [pytest.param(each, marks=() if each == "span" else LONG) for each in MUTATIONS])
async def test_a_mistake_of_a_daemon_shows_in_every_column(
    run: Run, drivers: dict[str, Sequence[str]], mutation: str
) -> None:
    known = {scenario.name: scenario for scenario in all_scenarios()}
    shown, hidden = SHOWN[mutation]
    outcomes = await run.scenario(known[shown], drivers, mutation)
    assert [name for name, outcome in outcomes.items() if not outcome.differences] == []
    if hidden is not None:
        outcomes = await run.scenario(known[hidden], drivers, mutation)
        assert [name for name, outcome in outcomes.items() if outcome.differences] == []


@pytest.mark.parametrize(
    "mistake", [pytest.param(each, marks=() if each == "no spans" else LONG) for each in wrong_driver.MISTAKES]
)
async def test_a_mistake_of_a_driver_shows_without_another_one_beside_it(run: Run, mistake: str) -> None:
    name, _ = wrong_driver.MISTAKES[mistake]
    scenario = next(each for each in all_scenarios() if each.name == name)
    command = sys.executable, "-m", wrong_driver.__name__, mistake
    outcome = (await run.scenario(scenario, {"wrong": command}))["wrong"]
    assert outcome.differences and outcome.results, outcome  # it ran to its end


async def test_what_a_driver_leaves_paused_fails_its_own_row_alone(daemons: Daemons) -> None:
    """The next driver finds a daemon that generates."""
    async with AsyncClient(daemons.open) as client:
        await client.pause(holder="forgetful", ttl_s=1000)
        assert await Subject(client, daemons.checkpoints).differences({}) == ["afterwards 'forgetful' holds a pause"]
        assert (await client.status()).state.phase == "running"
