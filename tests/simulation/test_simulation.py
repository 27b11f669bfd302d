"""The fleet under orders of events that seeds draw."""

import os

from tests.simulation.story import simulate


def test_simulated_fleets_keep_what_they_promise() -> None:
    """Every seed: see `invariants`."""
    first = int(os.environ.get("GENSERVE_SIMULATION_SEED", "1"))
    for seed in range(first, first + int(os.environ.get("GENSERVE_SIMULATION_SEEDS", "50"))):
        outcome = simulate(seed)
        assert not outcome.violations, str(outcome)
