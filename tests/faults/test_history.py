"""A history of random operations against a real daemon that is killed now and then, checked against a small model.

GENSERVE_HISTORY_S is how long the clients are at work, GENSERVE_HISTORY_SEED what their choices come from,
GENSERVE_HISTORY_FRONTENDS how many front ends there are: without it none, and then three. With some there is an
OpenAI server too.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from genserve.errors import ApplyInProgressError, VersionNotNewerError
from tests.faults.contents import Contents
from tests.faults.history import START_CONTENT, History, Outcome, excerpt
from tests.faults.history_model import Violation, label_violations, violations
from tests.faults.http_generator import MODEL
from tests.faults.recorder import Recorder
from tests.faults.scores import scored, scored_unlabelled, separation
from tests.faults.traffic import Traffic
from tests.faults.unlabelled_model import unlabelled_violations
from tests.support import faulty_worker
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.faulty_worker import FAULTS_VARIABLE, FAULTY_EXTENSION
from tests.support.patience import slow

DURATION_S = float(os.environ.get("GENSERVE_HISTORY_S", "15"))
SHORT_S = 6.0
SEED = os.environ.get("GENSERVE_HISTORY_SEED", "1")
NUMS_FRONTENDS = [int(number) for number in os.environ.get("GENSERVE_HISTORY_FRONTENDS", "0,3").split(",")]
TOLERANCE = 1.0
"""Between bfloat16's noise (0.54 at most in 180,000 tokens) and most tokens of other weights (several)."""
_LIFE_S = 45.0
# The heartbeat's timeout, the answers that follow, and the end of a process that does not answer.
_GIVE_UP_S = 90.0
_NUM_SHOWN = 3


class Daemons:
    """One daemon after the other on one checkpoint, with workers that fail as ordered."""

    def __init__(self, checkpoint: Path, directory: Path, num_frontends: int) -> None:
        self._flags = ["--model", str(checkpoint), *SMALL_ENGINE, "--worker-extension-cls", FAULTY_EXTENSION]
        self._flags += ["--frontends", str(num_frontends), "--served-model-name", MODEL]
        if num_frontends:
            self._flags += ["--openai-port", "0"]
        self._directory = directory
        self.faults = directory / "faults"
        self.faults.mkdir()

    @contextmanager
    def start(self, life: int) -> Iterator[DaemonProcess]:
        """A daemon that serves, killed at the end."""
        faulty_worker.release(self.faults)
        log = self._directory / f"stderr.{life}"
        daemon = DaemonProcess(self._flags, log, env={FAULTS_VARIABLE: str(self.faults), "PYTHONFAULTHANDLER": "1"})
        try:
            yield daemon.wait_serving()
        finally:
            daemon.kill()


async def live(
    daemon: DaemonProcess, recorder: Recorder, traffic: Traffic, rng: random.Random, duration_s: float, dies: bool
) -> None:
    """Traffic for a while. A daemon that is to die is killed, or its engine ends amid a commit or stops to answer."""
    history, life = recorder.history, recorder.life
    async with traffic:
        await slow(duration_s)
        if daemon.process.poll() is not None:
            last_s = max(o.responded_s for o in history.operations if o.life == life and o.outcome is Outcome.OK)
            pytest.fail(f"seed {SEED}: the daemon died\n{excerpt(history, life, last_s)}\n{daemon.stderr[-4000:]}")
        if not dies:
            return
        history.kills.append((life, time.monotonic()))
        fate = rng.choice(("killed", "killed", "dies in a commit", "wedged"))
        if fate == "wedged":
            daemon.descendant("EngineCore").send_signal(signal.SIGSTOP)
            assert await asyncio.to_thread(daemon.exit_status, _GIVE_UP_S) != 0
        elif fate == "dies in a commit":
            traffic.order_death(rng)
            with suppress(TimeoutError):
                async with asyncio.timeout(10.0):
                    while daemon.process.poll() is None:
                        await asyncio.sleep(0.05)
        daemon.kill()
        await slow(0.3)  # for what is still on its way to the clients


async def settle(client: AsyncClient, contents: Contents) -> None:
    """Everything that was left open ends by itself: nothing is paused, and a fresh push and generation work."""
    while True:
        version = (await client.get_weights()).weight_version + 1
        try:
            await client.push_weights(contents.whole(START_CONTENT), version=version)
            break
        except (ApplyInProgressError, VersionNotNewerError):  # a push goes on whose trainer has gone
            await asyncio.sleep(0.1)
    async with client.watch_status() as statuses:
        async for status in statuses:
            if status.state.phase == "running" and not status.state.pauses and status.load.running == 0:
                break
    assert len((await client.generate([5, 6, 7], max_tokens=8, ignore_eos=True)).token_ids) == 8


def report(history: History, found: list[Violation]) -> str:
    """The first violations, with what happened around them."""
    kinds = Counter(violation.kind for violation in found)
    shown = "\n\n".join(violation.describe(history) for violation in found[:_NUM_SHOWN])
    return f"seed {SEED}, {DURATION_S:g} s: violations {dict(kinds)}\n\n{shown}"


@pytest.mark.failure_is_final
async def test_a_short_history_is_that_of_one_register_of_weights(tmp_path: Path) -> None:
    """With front ends, and one kill of the daemon."""
    await check(tmp_path, NUMS_FRONTENDS[-1], SHORT_S)


@pytest.mark.long(
    "genserve/weights",
    "genserve/control",
    "genserve/rpc",
    "genserve/frontends",
    "genserve/engine/vllm",
    "genserve/ingest",
    "genserve/memory",
    "genserve/worker",
    "tests/faults/traffic.py",
    "tests/faults/history_model.py",
)
@pytest.mark.failure_is_final
@pytest.mark.timeout(300 + 4 * DURATION_S)
@pytest.mark.parametrize("num_frontends", NUMS_FRONTENDS)
async def test_a_history_of_random_operations_is_that_of_one_register_of_weights(
    tmp_path: Path, num_frontends: int
) -> None:
    """Pushes, pauses, faults and kills at random: the checks are in `history_model`."""
    assert await check(tmp_path, num_frontends, DURATION_S) > 0, "no push was applied, or no fault has happened"


async def check(directory: Path, num_frontends: int, duration_s: float) -> int:
    """Clients are at work for so long. How many faults have happened; 0, too, if no push was applied."""
    print(f"GENSERVE_HISTORY_SEED={SEED} GENSERVE_HISTORY_S={duration_s:g} GENSERVE_HISTORY_FRONTENDS={num_frontends}")
    history, rng = History(), random.Random(SEED)
    contents = Contents(directory)
    daemons = Daemons(contents.directories[START_CONTENT], directory, num_frontends)
    num_lives, num_faults = max(2, round(duration_s / _LIFE_S)), 0
    shares = [rng.uniform(0.5, 1.5) for _ in range(num_lives)]
    for life, share in enumerate(shares):
        is_last = life == num_lives - 1
        with daemons.start(life) as daemon:
            recorder = Recorder(history, life, contents)
            traffic = Traffic(recorder, daemon, f"{SEED}/{life}", daemons.faults, num_frontends)
            await live(daemon, recorder, traffic, rng, duration_s * share / sum(shares), dies=not is_last)
            num_faults += traffic.num_faults
            if is_last:
                async with AsyncClient(daemon.address) as client:
                    await settle(client, contents)
    kills = f"{len(history.frontend_kills)} kills of front ends"
    print(history.summary(), f"{num_faults} faults, {kills}", sep="\n")

    behind = scored(history, contents)
    own, told_apart = separation(history, behind, TOLERANCE)
    print(f"{len(own)} tokens scored, at most {own[-1]:.3f} behind; {told_apart:.0%} of others are told apart")
    found = violations(history) + label_violations(history, behind, TOLERANCE)
    found += unlabelled_violations(history, scored_unlabelled(history, contents), TOLERANCE)
    assert not found, report(history, found)
    assert told_apart > 0.5, "the scores cannot tell the weights apart"
    return num_faults if any(operation.applied is not None for operation in history.operations) else 0
