"""A history of random operations against four real daemons and their router, all of which are killed now and then.

GENSERVE_FLEET_HISTORY_S is how long the clients are at work, GENSERVE_HISTORY_SEED what their choices come from.
"""

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from genserve.errors import ApplyInProgressError
from tests.faults.contents import Contents
from tests.faults.fleet_model import fleet_violations
from tests.faults.fleet_processes import FleetProcesses
from tests.faults.fleet_states import all_ready, until
from tests.faults.fleet_traffic import FleetTraffic
from tests.faults.history import START_CONTENT, History, Outcome
from tests.faults.history_model import label_violations
from tests.faults.recorder import Recorder
from tests.faults.scores import scored, separation

DURATION_S = float(os.environ.get("GENSERVE_FLEET_HISTORY_S", "25"))
SEED = os.environ.get("GENSERVE_HISTORY_SEED", "1")
NUM_REPLICAS = 4
TOLERANCE = 1.0
"""As in test_history."""


async def settled(client: AsyncClient, contents: Contents, version: int) -> None:
    """A fresh push passes, as soon as that of a trainer who has gone is over."""
    async with asyncio.timeout(120):
        while True:
            try:
                await client.push_weights(contents.whole(START_CONTENT), version=version, timeout_s=120)
                return
            except ApplyInProgressError:
                await asyncio.sleep(0.2)


@pytest.mark.long(
    *("genserve/fleet", "genserve/client", "genserve/rpc", "genserve/control", "genserve/weights"),
    "tests/faults/fleet_traffic.py",
)
@pytest.mark.failure_is_final
@pytest.mark.timeout(400 + 4 * DURATION_S)
async def test_a_fleet_serves_nothing_but_what_was_committed(tmp_path: Path) -> None:
    """Pushes, pauses, kills, joins and frozen replicas at random: the checks are in `fleet_model`."""
    print(f"GENSERVE_HISTORY_SEED={SEED} GENSERVE_FLEET_HISTORY_S={DURATION_S:g}")
    contents, history = Contents(tmp_path), History()
    flags = ["--silence", "3s", "--settle", "20s", "--policy", "session,prefix-aware,requests"]
    processes = FleetProcesses(contents.directories[START_CONTENT], tmp_path, NUM_REPLICAS, flags)
    recorder = Recorder(history, 0, contents)
    traffic = FleetTraffic(recorder, processes, SEED)
    with processes.running() as fleet:
        async with AsyncClient(fleet.router_address) as client:
            await until(client, all_ready)
            await traffic.run(DURATION_S)
            await until(client, lambda replicas: True)  # the router may have been started again just now
            await client.resume(force=True)
            version = 1 + max(o.push.version for o in history.operations if o.push is not None)
            await until(client, lambda replicas: any(each.state == "ready" for each in replicas.replicas))
            await settled(client, contents, version)
            await until(client, lambda replicas: all_ready(replicas) and replicas.weight_version == version)
    print(history.summary(), dict(traffic.happened), sep="\n")
    behind = scored(history, contents)
    own, told_apart = separation(history, behind, TOLERANCE)
    print(f"{len(own)} tokens scored, at most {own[-1]:.3f} behind; {told_apart:.0%} of others are told apart")
    found = fleet_violations(history) + label_violations(history, behind, TOLERANCE)
    kinds = Counter(violation.kind for violation in found)
    shown = "\n\n".join(violation.describe(history) for violation in found[:3])
    assert not found, f"seed {SEED}, {DURATION_S:g} s: violations {dict(kinds)}\n\n{shown}"
    assert told_apart > 0.5, "the scores cannot tell the weights apart"
    assert any(o.push is not None and o.outcome is Outcome.OK for o in history.operations)
    assert traffic.happened
