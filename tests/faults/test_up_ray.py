"""`genserve up --ray` and `genserve route --ray` on a real cluster: actors that die, orders to end, and nothing that is
left behind."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from genserve.client import Client
from genserve.net import is_loopback
from tests.faults.ray_cluster import NUM_CPUS, RayCluster, RayUpProcess
from tests.support.daemon_process import SMALL_ENGINE
from tests.support.router_process import RouterProcess

FLAGS = ("--allow-insecure", "--drain-timeout", "10s", *SMALL_ENGINE)
PROMPT = [9, 8, 7]
NOTHING = {"actors": [], "groups": [], "used_cpus": 0.0}

LONG = pytest.mark.long(
    "genserve/placement", "genserve/fleet", "genserve/launcher", "genserve/cli/up.py", "tests/faults/ray_cluster.py"
)

Starts = Callable[..., RayUpProcess]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Without a fleet, and without a process that does not end with it."""
    running = RayCluster(tmp_path_factory.mktemp("ray") / "head")
    try:
        yield running
    finally:
        left = running.end()
    assert left == []


@pytest.fixture(scope="module")
def starts(
    cluster: RayCluster, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Starts]:
    """Starts one, with further flags."""
    directory = tmp_path_factory.mktemp("up")
    started: list[RayUpProcess] = []

    def start(num_replicas: int, *flags: str) -> RayUpProcess:
        model = ("--model", str(checkpoints["a"]))
        log = directory / str(len(started))
        up = RayUpProcess(cluster, ["--replicas", str(num_replicas), *FLAGS, *model, *flags], log)
        started.append(up)
        return up

    yield start
    for each in started:
        each.end()


@pytest.fixture(scope="module")
def fleet(starts: Starts, checkpoints: dict[str, Path]) -> Iterator[tuple[RayUpProcess, Client]]:
    """Two replicas that serve version 7. The tests come in order: the last of these ends them."""
    up = starts(2)
    with Client(up.address()) as client:
        up.until_ready(client, 2)
        client.push_weights(checkpoints["b"], version=7)
        yield up, client


@pytest.fixture(scope="module")
def finder(
    fleet: tuple[RayUpProcess, Client], cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """Of another router, which was only told of the cluster."""
    router = RouterProcess(["--port", "0", "--ray", cluster.address], tmp_path_factory.mktemp("route") / "log")
    with Client(router.address) as client:
        yield client
    router.kill()


def addresses(client: Client) -> set[str]:
    """Of all replicas."""
    return {each.address for each in client.list_replicas().replicas}


@LONG
def test_a_cluster_that_has_no_room_is_described(
    fleet: tuple[RayUpProcess, Client], starts: Starts, cluster: RayCluster
) -> None:
    """Within the time that was given, and nothing is left of the attempt. The fleet that has the room serves on."""
    up = starts(1, "--ray-name", "second", "--ray-timeout", "1s")
    assert up.process.wait(150) == 2
    assert "Ray has not placed the replicas within 1 s: 1 replica needs 1 CPU and 0 GPUs on one node; " in up.stderr
    has = f"{cluster.node_address} has {NUM_CPUS} CPUs and 0 GPUs"
    assert f"room for {NUM_CPUS} when nothing else runs ({has}), and 0 CPUs and 0 GPUs free" in up.stderr
    up = starts(1)  # of the same name
    assert up.process.wait(150) == 2
    assert cluster.until_groups(["genserve-genserve"]) == ["genserve-genserve"]
    _, client = fleet
    assert {each.state for each in client.list_replicas().replicas} == {"ready"}


@LONG
def test_replicas_on_ray_have_their_cores_and_their_lines(fleet: tuple[RayUpProcess, Client]) -> None:
    """As on one host: each its own cores, and its number before what it says."""
    up, _ = fleet
    cores = [os.sched_getaffinity(pid) for pid in up.daemons]
    assert len(cores) == 2
    if len(os.sched_getaffinity(0)) > 1:
        assert not cores[0] & cores[1]
    for number in (0, 1):
        up.until_said(rf"^\[{number}\] genserve: serving ")


@LONG
@pytest.mark.parametrize("how", ["by Ray", "by a signal"])
def test_replica_with_killed_actor_restarts_with_weights_of_the_others(
    fleet: tuple[RayUpProcess, Client], finder: Client, cluster: RayCluster, how: str
) -> None:
    """Ray starts an actor again that has crashed, and `up` makes one anew that somebody has killed for good. Meanwhile
    every token is of the version of the fleet. A router that looks for the actors, and stands by, finds the new address
    too."""
    up, client = fleet
    up.until(lambda: [each.reason.count("looks after") for each in finder.list_replicas().replicas] == [1] * 2)
    known = addresses(client)
    assert addresses(finder) == known
    versions: set[int] = set()
    num_answers = 0
    is_restored = threading.Event()

    def generate() -> None:
        nonlocal num_answers
        while not is_restored.wait(0.2):  # which leaves the cores to the replica that starts
            result = client.generate(PROMPT, max_tokens=8, ignore_eos=True)
            versions.update(span.version for span in result.sequences[0].weight_spans)
            num_answers += 1

    daemons, actors = set(up.daemons), cluster.actors
    generating = threading.Thread(target=generate)
    generating.start()
    try:
        if how == "by Ray":
            cluster.kill_actor(0)
        else:
            os.kill(actors[0], signal.SIGKILL)
        up.until(lambda: len(set(up.daemons) - daemons) == 1 and len(up.daemons) == 2)
        up.until(lambda: addresses(client) != known)
        replicas = up.until_ready(client, 2)
    finally:
        is_restored.set()
        generating.join(60)
    assert versions == {7} and num_answers > 0
    assert [each.engine.weight_version for each in replicas if each.engine is not None] == [7, 7]
    assert len({each.address for each in replicas} - known) == 1
    up.until(lambda: addresses(finder) == addresses(client))
    up.until_said(r"^genserve: replica [01]: its actor was lost \(.*\); it is started again in ")


@LONG
def test_sigterm_drains_all_and_gives_everything_back(fleet: tuple[RayUpProcess, Client], cluster: RayCluster) -> None:
    """The daemons end in order, and Ray has no actor and no placement group of the fleet."""
    up, _ = fleet
    assert len(up.daemons) == 2
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(60) == 0, up.stderr[-4000:]
    assert up.left(timeout_s=0.0) == []
    assert cluster.until_free() == NOTHING


@LONG
@pytest.mark.parametrize("is_driver_killed", [False, True])
def test_nothing_outlives_an_up_that_is_killed(starts: Starts, cluster: RayCluster, is_driver_killed: bool) -> None:
    """Neither a daemon nor what was reserved: its other process sees to it, or Ray if that is killed too."""
    up = starts(1)
    up.until_said(r"^\[0\] genserve: starting the engine")
    assert len(up.daemons) == 1
    driver = up.driver()
    if is_driver_killed:
        driver.kill()
    up.process.kill()
    up.process.wait()
    psutil.wait_procs([driver], timeout=60)
    assert not driver.is_running()
    assert up.left() == []
    assert cluster.until_free() == NOTHING


@LONG
def test_flags_that_only_the_engine_can_read_end_it_with_the_engines_words(starts: Starts, cluster: RayCluster) -> None:
    """No second start is tried."""
    up = starts(1, "--max-model-len", "many")
    assert up.process.wait(120) == 2
    assert "no replica can be started: the daemon ended with status 2: argument --max-model-len: " in up.stderr
    assert "started again" not in up.stderr
    assert cluster.until_free() == NOTHING


@LONG
def test_daemons_listen_for_other_hosts_only_if_the_user_says_so(cluster: RayCluster) -> None:
    """They have no encryption, and the addresses of their nodes can be reached."""
    if is_loopback(cluster.node_address):
        pytest.skip("this host has no address but that of itself")
    command = [sys.executable, "-m", "genserve", "up", "--ray", cluster.address, "--replicas", "1", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert f"the addresses of their nodes ({cluster.node_address}), without encryption" in done.stderr
    assert cluster.until_free() == NOTHING


def test_a_cluster_that_is_not_there_is_not_started() -> None:
    """Ray would start one without a word. The error says how to."""
    command = [sys.executable, "-m", "genserve", "up", "--ray", "127.0.0.1:9", "--replicas", "1", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "genserve: no Ray cluster at 127.0.0.1:9 that this host is a node of (" in done.stderr
    assert "start one with `ray start --head`" in done.stderr
