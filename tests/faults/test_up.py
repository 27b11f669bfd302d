"""`genserve up`: replicas that die, orders to end, and nothing that is left behind."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from genserve.client import Client, Generation
from tests.faults.up_process import UpProcess
from tests.support.daemon_process import SMALL_ENGINE

FLAGS = ("--drain-timeout", "10s", *SMALL_ENGINE)
PROMPT = [9, 8, 7]

Starts = Callable[..., UpProcess]


@pytest.fixture(scope="module")
def starts(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    """Starts one, with further flags; `cold` as of UpProcess."""
    directory = tmp_path_factory.mktemp("up")
    started: list[UpProcess] = []

    def start(num_replicas: int, *flags: str, cold: bool = False) -> UpProcess:
        model = ("--model", str(checkpoints["a"]))
        command = ["--replicas", str(num_replicas), *FLAGS, *model, *flags]
        up = UpProcess(command, directory / str(len(started)), cold=cold)
        started.append(up)
        return up

    yield start
    for each in started:
        each.end()


@pytest.fixture(scope="module")
def fleet(starts: Starts) -> Iterator[tuple[UpProcess, Client]]:
    """Two replicas that serve. The tests come in order: the last one ends them."""
    up = starts(2)
    with Client(up.address()) as client:
        up.until_ready(client, 2)
        yield up, client


def greedy(client: Client) -> list[int]:
    """What the model says."""
    return list(client.generate(PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True).token_ids)


def test_replicas_serve_through_the_router(fleet: tuple[UpProcess, Client]) -> None:
    """Both say the same; each has its own cores, and its lines have its number."""
    up, client = fleet
    outputs = [greedy(client) for _ in range(4)]
    assert outputs == [outputs[0]] * 4
    cores = [os.sched_getaffinity(pid) for pid in up.daemons]
    assert len(cores) == 2
    if len(os.sched_getaffinity(0)) > 1:
        assert not cores[0] & cores[1]
    for number in (0, 1):
        up.until_said(rf"^\[{number}\] genserve: serving ")


def test_killed_replica_restarts_with_the_weights_of_the_others(
    fleet: tuple[UpProcess, Client], checkpoints: dict[str, Path]
) -> None:
    """It has loaded the checkpoint, and gets requests when it has what was pushed. The others serve meanwhile."""
    up, client = fleet
    before = greedy(client)
    client.push_weights(checkpoints["b"], version=7)
    pushed = greedy(client)
    assert pushed != before
    known = {each.address for each in client.list_replicas().replicas}
    dead = up.daemons[0]
    os.kill(dead, signal.SIGKILL)
    assert greedy(client) == pushed
    up.until(lambda: dead not in up.daemons and len(up.daemons) == 2)
    replicas = up.until_ready(client, 2)
    assert [each.engine.weight_version for each in replicas if each.engine is not None] == [7, 7]
    assert len({each.address for each in replicas} - known) == 1
    assert [greedy(client) for _ in range(4)] == [pushed] * 4
    up.until_said(r"^genserve: replica [01]: the daemon was ended by SIGKILL.*; it is started again in 0\.5 s$")


def test_sigterm_drains_the_router_and_the_replicas(fleet: tuple[UpProcess, Client]) -> None:
    """A stream ends as it should, and no process is left."""
    up, client = fleet
    generation = Generation()
    begun = threading.Event()

    def read() -> None:
        for delta in client.stream(PROMPT, temperature=0.0, max_tokens=200, ignore_eos=True):
            generation.add(delta)
            begun.set()

    reading = threading.Thread(target=read)
    reading.start()
    assert begun.wait(90)
    assert len(up.daemons) == 2
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(60) == 0
    reading.join(60)
    assert len(generation.token_ids) == 200
    assert up.left(timeout_s=0.0) == []


@pytest.mark.parametrize(
    ("said", "cold"),
    [
        pytest.param(r"^\[0\] genserve: starting the engine", True, marks=pytest.mark.long("genserve/placement")),
        (r"^\[0\] genserve: serving", False),
    ],
)
def test_no_daemon_outlives_an_up_that_is_killed(starts: Starts, said: str, *, cold: bool) -> None:
    """While it starts, as a user's does, and while it serves."""
    up = starts(1, cold=cold)
    up.until_said(said)
    assert len(up.daemons) == 1
    up.process.kill()
    up.process.wait()
    assert up.left() == []


def test_replicas_that_start_are_listed_with_their_step(starts: Starts) -> None:
    """By the router, which does not say that it runs, nor what it would serve."""
    up = starts(1)
    with Client(up.address()) as client:
        up.until(lambda: "its engine is starting: " in "".join(each.reason for each in client.list_replicas().replicas))
        (replica,) = client.list_replicas().replicas
        status = client.status()
        assert (replica.state, status.state.phase) == ("connecting", "starting")
        assert status.state.startup is not None and replica.address in status.state.startup.step
        up.until_ready(client, 1)
        assert client.status().state.startup is None


def test_a_model_that_no_start_accepts_ends_it_at_the_first_one(starts: Starts, tmp_path: Path) -> None:
    """Of which the engine alone knows: a kind of model that does not exist."""
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    up = starts(1, "--model", str(tmp_path))
    assert up.process.wait(120) == 2
    assert "no replica can be started: the daemon ended with status 2: " in up.stderr
    assert "no-such-model" in up.stderr
    assert "started again" not in up.stderr


def test_flags_that_only_the_engine_can_read_end_it_with_the_engines_words(starts: Starts) -> None:
    """No second start is tried."""
    up = starts(1, "--max-model-len", "many")
    assert up.process.wait(120) == 2
    assert "no replica can be started: the daemon ended with status 2: argument --max-model-len: " in up.stderr
    assert "started again" not in up.stderr
