"""The fleet under orders of events that seeds draw: messages late or lost, links cut, replicas and routers killed.

GENSERVE_SIMULATION_SEED=7 scripts/test tests/simulation/test_simulation.py -k quick   # that seed, and those after it
GENSERVE_SIMULATION_SEEDS=5000 scripts/test tests/simulation                           # so many in the long test
"""

import os
import subprocess
import sys
from itertools import count, islice

import pytest

from genserve.fleet.router import Router
from tests.simulation.ablations import ABLATIONS, is_about, without
from tests.simulation.sight import Sight
from tests.simulation.story import Outcome, simulate

FIRST = int(os.environ.get("GENSERVE_SIMULATION_SEED", "1"))
NUM_QUICK, NUM_LONG = 8, int(os.environ.get("GENSERVE_SIMULATION_SEEDS", "1000"))
MOST_SEEDS = 1000
"""Within which the lack of a safeguard is to be found. The rarest, a pause that is not undone, shows in one of 130."""
ABOUT = ("genserve/fleet", "genserve/control", "tests/simulation")


def keep_promises(first: int, count: int) -> None:
    """Each of these seeds; the report of one that does not tells all that happened."""
    for seed in range(first, first + count):
        outcome = simulate(seed)
        assert not outcome.violations, str(outcome)


def test_a_fleet_keeps_its_promises_in_quick_simulations() -> None:
    """Those of `invariants`."""
    keep_promises(FIRST, NUM_QUICK)


@pytest.mark.long(*ABOUT)
@pytest.mark.timeout(0)
def test_a_fleet_keeps_its_promises_in_many_simulations() -> None:
    """The same for many seeds."""
    keep_promises(FIRST, NUM_LONG)


@pytest.mark.slow
def test_a_seed_tells_one_history() -> None:
    """In another process too, where sets of strings and of objects have another order: so that what it has found can
    be looked at."""
    command = [sys.executable, "-c", f"from {__name__} import digests; print(digests())"]
    told = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
        for seed in ("1", "2")
    ]
    assert {each.stdout.strip() for each in told} == {str(digests())}


@pytest.mark.slow
def test_a_simulation_that_cannot_look_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not seen is no proof."""

    def broken(sight: Sight) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Sight, "note_lost", broken)
    with pytest.raises(KeyError, match="a bug"):
        simulate(FIRST)


@pytest.mark.slow
def test_a_simulation_in_which_a_task_fails_finds_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real program would end, or lack what the task was for: nobody waits for it."""

    async def broken(router: Router) -> None:
        await router.settle()
        raise KeyError("a bug")

    monkeypatch.setattr(Router, "follow", broken)
    assert "a bug" in simulate(FIRST).violations[0]


def digests() -> list[str]:
    """Of what happened with the quick seeds."""
    return [simulate(seed).events.digest for seed in range(FIRST, FIRST + NUM_QUICK)]


@pytest.mark.long(*ABOUT)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("safeguard", ABLATIONS)
def test_what_lacks_a_safeguard_is_found(safeguard: str) -> None:
    """A simulation that finds nothing without one would prove nothing with it."""
    with without(safeguard):
        found = first_violation(safeguard)
    assert found is not None
    print(f"{safeguard}: seed {found.seed}: {found.violations[0]}")


def first_violation(safeguard: str) -> Outcome | None:
    """Of the first seed that has one, of those whose stories are about what is lacking."""
    seeds = islice((seed for seed in count(1) if is_about(safeguard, seed)), MOST_SEEDS)
    outcomes = map(simulate, seeds)
    return next((outcome for outcome in outcomes if outcome.violations), None)
