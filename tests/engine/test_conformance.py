"""Every driver of clients/conformance over every scenario, and mistakes of a daemon that the table must show."""

from collections.abc import AsyncIterator, Sequence

import pytest

from clients.conformance.runner import checkpoints
from clients.conformance.runner.daemons import Daemons, running
from clients.conformance.runner.drivers import CLIENTS, DRIVERS
from clients.conformance.runner.run import Run, subject_of
from clients.conformance.runner.scenario import Scenario, all_scenarios
from clients.conformance.runner.subject import Subject

Tested = tuple[Daemons, Subject, dict[str, str]]

SHOWN = {
    "field": "generate-many",
    "reason": "push-version-mismatch",
    "span": "several-sequences",
}
"""A scenario that each mistake must fail, beside `deadline`, which none may."""


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
    has_packages = (CLIENTS / "typescript/node_modules").is_dir()
    return {name: command for name, command in DRIVERS.items() if has_packages or name != "typescript"}


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
    outcomes = await run.scenario(known[SHOWN[mutation]], drivers)
    assert [name for name, outcome in outcomes.items() if not outcome.differences] == []
    outcomes = await run.scenario(known["deadline"], drivers)
    assert [name for name, outcome in outcomes.items() if outcome.differences] == []
