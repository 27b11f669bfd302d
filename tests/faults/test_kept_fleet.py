"""A fleet of which every process has died comes back with the version that it served."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from genserve.cli import main
from genserve.client import Client
from tests.faults.up_process import UpProcess
from tests.support import patience
from tests.support.daemon_process import SMALL_ENGINE

pytestmark = pytest.mark.long("genserve/weights/kept", "genserve/placement", "genserve/fleet/push")
PROMPT = [9, 8, 7]


def greedy(client: Client) -> list[int]:
    """What the model says."""
    return list(client.generate(PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True).token_ids)


def versions(directory: Path) -> set[int]:
    """What the replicas have on their disks."""
    records = [directory / f"replica-{number}" / "current" / "genserve.json" for number in (0, 1)]
    return {int(json.loads(each.read_text())["weight_version"]) if each.exists() else 0 for each in records}


def exchange_with_the_version_before(own: Path) -> None:
    """What a replica had on its disk before its last version was written."""
    (own / "current").rename(own / "away")
    (own / "previous").rename(own / "current")
    (own / "away").rename(own / "previous")


def bring_back_with_the_version_before(up: UpProcess, kept: Path) -> None:
    """Kills a replica as if the rollback had not been written yet: its disk has the version that is rolled back."""
    dead = up.daemons[0]
    command = " ".join(psutil.Process(dead).cmdline())
    own = next(each for each in kept.iterdir() if str(each) in command)
    os.kill(dead, signal.SIGKILL)
    exchange_with_the_version_before(own)
    up.until(lambda: dead not in up.daemons and len(up.daemons) == 2)
    up.until_said(r"^\[[01]\] genserve: --keep-committed: version 9 of ")


@pytest.mark.timeout(900)
def test_a_fleet_that_died_comes_back_with_its_version(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Each replica has its own directory. A rollback through the router is one for all, and stays when a replica comes
    back with the version that was rolled back."""
    kept = tmp_path / "kept"
    command = ["--replicas", "2", "--drain-timeout", "10s", *SMALL_ENGINE, "--model", str(checkpoints["a"])]
    command += ["--keep-committed", str(kept)]
    up = UpProcess(command, tmp_path / "first.log")
    try:
        address = up.address()
        with Client(address) as client:
            up.until_ready(client, 2)
            said = {0: greedy(client)}
            for version, name in ((7, "b"), (9, "a")):
                client.push_weights(checkpoints[name], version=version)
                patience.wait_until(lambda: versions(kept) == {version})  # noqa: B023
                said[version] = greedy(client)
            assert said[0] == said[9] != said[7]
            assert main(["rollback", "--target", address]) == 0
            assert [greedy(client) for _ in range(4)] == [said[7]] * 4
            patience.wait_until(lambda: versions(kept) == {7})
            bring_back_with_the_version_before(up, kept)
            replicas = up.until_ready(client, 2)
            assert [each.engine.weight_version for each in replicas if each.engine is not None] == [7, 7]
            assert [greedy(client) for _ in range(4)] == [said[7]] * 4
            patience.wait_until(lambda: versions(kept) == {7})
        up.process.send_signal(signal.SIGKILL)
    finally:
        up.end()
    # One of them has missed the rollback: the highest number is not the version of the fleet.
    exchange_with_the_version_before(kept / "replica-0")
    up = UpProcess(command, tmp_path / "second.log")
    try:
        with Client(up.address()) as client:
            replicas = up.until_ready(client, 2)
            assert [each.engine.weight_version for each in replicas if each.engine is not None] == [7, 7]
            assert [greedy(client) for _ in range(4)] == [said[7]] * 4
            up.until_said(r"^\[0\] genserve: --keep-committed: version 9 of ")
    finally:
        up.end()
