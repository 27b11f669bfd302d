"""A history of random operations against four real daemons and their router, all of which are killed now and then.

GENSERVE_FLEET_HISTORY_S is how long the clients are at work, GENSERVE_HISTORY_SEED what their choices come from. In a
long one everything has to happen that can; in the default time a part of it does.
"""

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from genserve.errors import ApplyInProgressError, FleetPushError, NoReplicaError, UnavailableError
from tests.faults.contents import Contents
from tests.faults.fleet_model import fleet_violations
from tests.faults.fleet_processes import FleetProcesses
from tests.faults.fleet_states import all_ready, until
from tests.faults.fleet_traffic import FleetTraffic
from tests.faults.fleet_work import FleetWork
from tests.faults.history import START_CONTENT, History, Outcome
from tests.faults.history_model import label_violations
from tests.faults.recorder import Recorder
from tests.faults.scores import scored, separation
from tests.support import adapters, patience

DURATION_S = float(os.environ.get("GENSERVE_FLEET_HISTORY_S", "22"))
SEED = os.environ.get("GENSERVE_HISTORY_SEED", "1")
NUM_REPLICAS = 4
TOLERANCE = 1.5
"""As in test_history, but adapters double the noise: 0.83 at most in 21,000 tokens, and without them 0.36 in 52,000."""
LONG_S = 300.0
"""In which everything has to happen."""
ADAPTER = "w"
"""The content that is loaded from a directory."""
ROUTER_FLAGS = ["--silence", f"{5 * patience.SCALE:g}s", "--settle", "20s", "--wait-ready", "30s"]
ROUTER_FLAGS += ["--policy", "session,prefix-aware,requests"]
DAEMON_FLAGS = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
EVENTS = {
    *("push", "forced push", "rollback", "canary", "pause", "sleep", "push_lora", "load_lora", "unload_lora"),
    *("replica killed", "replica frozen", "replica drained", "router killed", "router taken over"),
    *("total death", "total death, all on disk", "token with an adapter"),
}


async def settled(client: AsyncClient, contents: Contents, version: int) -> None:
    """Everything that was left open ends, and a fresh push passes: as soon as that of a trainer who has gone is over,
    and replicas that have just been started are there."""
    async with asyncio.timeout(patience.START_S):
        while True:
            try:
                await client.wake_up()
                await client.resume(force=True)
                await client.push_weights(contents.whole(START_CONTENT), version=version, timeout_s=120)
                return
            except (ApplyInProgressError, FleetPushError, NoReplicaError, UnavailableError):
                await asyncio.sleep(0.2)


@pytest.mark.long(
    *("genserve/fleet", "genserve/client", "genserve/rpc", "genserve/control", "genserve/weights"),
    *("tests/faults/fleet_traffic.py", "tests/faults/fleet_trainer.py", "tests/faults/fleet_operator.py"),
    *("tests/faults/fleet_disturber.py", "tests/faults/fleet_model.py"),
)
@pytest.mark.failure_is_final
@pytest.mark.timeout(400 + 4 * DURATION_S)
async def test_a_fleet_serves_nothing_but_what_was_committed(tmp_path: Path) -> None:
    """Pushes, rollbacks, canaries, pauses, sleeps, adapters, kills, joins, frozen replicas, two routers, and the death
    of all processes at random: the checks are in `fleet_model`."""
    print(f"GENSERVE_HISTORY_SEED={SEED} GENSERVE_FLEET_HISTORY_S={DURATION_S:g}")
    contents, history = Contents(tmp_path), History()
    start, directory = contents.directories[START_CONTENT], tmp_path / "adapter"
    processes = FleetProcesses(start, tmp_path, NUM_REPLICAS, ROUTER_FLAGS, DAEMON_FLAGS, keeps=True)
    work = FleetWork(Recorder(history, 0, contents), processes, SEED)
    traffic = FleetTraffic(work, (str(adapters.saved(contents.adapters[ADAPTER], directory)), ADAPTER))
    with processes.running():
        async with AsyncClient(processes.router_address) as client:
            await until(client, all_ready)
        await traffic.run(DURATION_S)
        happened = events(history) + work.happened
        print(history.summary(), dict(sorted(happened.items())), sep="\n")
        async with AsyncClient(processes.router_address) as client:
            version = 1 + max(o.push.version for o in history.operations if o.push is not None)
            await settled(client, contents, version)
            await until(client, lambda replicas: all_ready(replicas) and replicas.weight_version == version)

    behind = scored(history, contents)
    own, told_apart = separation(history, behind, TOLERANCE)
    print(f"{len(own)} tokens scored, at most {own[-1]:.3f} behind; {told_apart:.0%} of others are told apart")
    found = fleet_violations(history) + label_violations(history, behind, TOLERANCE)
    kinds = Counter(violation.kind for violation in found)
    shown = "\n\n".join(violation.describe(history) for violation in found[:3])
    assert not found, f"seed {SEED}, {DURATION_S:g} s: violations {dict(kinds)}\n\n{shown}"
    assert told_apart > 0.5, "the scores cannot tell the weights apart"
    assert happened["push"] and work.happened
    assert DURATION_S < LONG_S or not (missing := EVENTS - happened.keys()), f"did not happen: {missing}"


def events(history: History) -> Counter[str]:
    """What was done with success, as often as it was."""
    done = [operation for operation in history.operations if operation.outcome is Outcome.OK]
    happened = Counter("forced push" if o.kind == "push" and o.push and o.push.force else o.kind for o in done)
    happened["change of an adapter on all"] = sum(operation.is_everywhere for operation in done)
    happened["token with an adapter"] = sum(
        span.end - span.start
        for stream in history.streams
        for delta in stream.deltas
        for span in delta.spans
        if span.lora_version
    )
    return Counter({kind: count for kind, count in happened.items() if count})
