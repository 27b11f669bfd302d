"""`genserve up`: what was pushed outlives replicas that end one after the other, also if hardly any is there."""

import os
import signal
from pathlib import Path

import pytest

from genserve.cli import main
from genserve.client import Client
from tests.faults.up_process import UpProcess
from tests.support.daemon_process import SMALL_ENGINE

pytestmark = pytest.mark.long("genserve/fleet", "genserve/control", "genserve/placement")
PROMPT = [9, 8, 7]


def greedy(client: Client) -> list[int]:
    """What the model says."""
    return list(client.generate(PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True).token_ids)


@pytest.mark.timeout(900)
def test_a_replica_that_is_ended_while_the_other_starts_hands_over(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """It is the only one with the version: SIGTERM waits until the other one has fetched it. So does `genserve drain`,
    which is what upgrades replicas of `up` one by one."""
    command = ["--replicas", "2", "--drain-timeout", "10m", *SMALL_ENGINE, "--model", str(checkpoints["a"])]
    up = UpProcess(command, tmp_path / "log")
    try:
        address = up.address()
        with Client(address) as client:
            up.until_ready(client, 2)
            client.push_weights(checkpoints["b"], version=7)
            pushed = greedy(client)
            killed, ended = up.daemons
            os.kill(killed, signal.SIGKILL)
            up.until(lambda: len(client.list_replicas().replicas) == 1)  # nobody else is known to have it
            os.kill(ended, signal.SIGTERM)
            up.until(lambda: not {killed, ended} & set(up.daemons) and len(up.daemons) == 2)
            replicas = up.until_ready(client, 2)
            assert [each.engine.weight_version for each in replicas if each.engine is not None] == [7, 7]
            up.until_said(r"no other replica of the router at .* has what was pushed")
            assert [greedy(client) for _ in range(4)] == [pushed] * 4
            for replica in replicas:
                assert main(["replicas", "drain", replica.address, "--target", address]) == 0
                assert main(["drain", "--target", replica.address]) == 0
                assert main(["replicas", "wait", "2", "--timeout", "5m", "--target", address]) == 0
            replicas = up.until_ready(client, 2)
            assert [each.engine.weight_version for each in replicas if each.engine is not None] == [7, 7]
            assert [greedy(client) for _ in range(4)] == [pushed] * 4
    finally:
        up.end()
