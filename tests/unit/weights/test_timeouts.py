"""How long the steps of a push or an update may take; and how long a stream waits for another one, on a clock that the
test moves."""

import asyncio

import pytest

from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import (
    DeadlineError,
    EngineTaintedError,
    GenserveError,
    PushConflictError,
    PushNotFoundError,
    PushRolledBackError,
)
from genserve.weights.push.stream import PushStream
from genserve.weights.push.types import ApplyOptions, PushHeader
from genserve.weights.vllm_transfer import UpdateOptions
from tests.unit.weights.conftest import Rig, further, header, send, tensors, weights
from tests.unit.weights.transfers import HALF, finish

DISCARD_S, LATE_DISCARD_S, HEAL_S, ABANDON_S = 30.0, 1.0, 300.0, 30.0


async def test_each_step_has_what_the_ones_before_have_left(rig: Rig) -> None:
    """Freeing what was replaced has a time of its own: requests run then."""
    await rig.push(header(apply=ApplyOptions(timeout_s=20.0)))
    given_s = [rig.engine.timeouts_s[step] for step in ("prepare_weights", "pause", "commit_weights")]
    assert 20.0 > given_s[0] > given_s[1] > given_s[2] > 0
    async with rig.applier.between_pushes(30.0):  # it is freed after the answer
        assert rig.engine.timeouts_s["discard_weights"] == DISCARD_S


@pytest.mark.parametrize(
    ("failure", "discard_s"), [(PushRolledBackError("no"), DISCARD_S), (DeadlineError("late"), LATE_DISCARD_S)]
)
async def test_a_worker_that_was_late_is_not_waited_for_long(rig: Rig, failure: Exception, discard_s: float) -> None:
    """It frees what it has prepared when it goes on; the trainer gets its answer on time."""
    rig.engine.fails["prepare_weights"] = failure
    with pytest.raises(type(failure)):
        await rig.push(header())
    assert rig.engine.timeouts_s["discard_weights"] == discard_s


async def test_healing_takes_the_time_that_it_needs(rig: Rig) -> None:
    """Whatever the push has left: an engine without a consistent version serves nobody."""
    rig.engine.fails["commit_weights"] = EngineTaintedError("half")
    with pytest.raises(PushRolledBackError):
        await rig.push(header(apply=ApplyOptions(timeout_s=20.0)))
    assert (rig.engine.timeouts_s["prepare_weights"], rig.engine.timeouts_s["commit_weights"]) == (HEAL_S, HEAL_S)


async def test_an_update_of_vllm_s_has_the_times_that_its_caller_gives(rig: Rig) -> None:
    """Each call its own; beginning has what the pause has left. Where nothing is said: a minute to begin, and a minute
    between two calls."""
    rig.engine.backend = "scripted"
    assert UpdateOptions() == UpdateOptions(PauseMode.KEEP, KvPolicy.RECOMPUTE, "", "", ttl_s=60.0, timeout_s=60.0)
    await rig.transfers.init("{}", 4.0)
    await rig.transfers.start(UpdateOptions(timeout_s=20.0))
    await rig.transfers.update("", HALF, 6.0)
    await rig.transfers.finish("", None, 7.0)
    given_s = rig.engine.timeouts_s
    assert 20.0 >= given_s["pause"] > given_s["transfer_start"] > 0
    assert [given_s[f"transfer_{call}"] for call in ("init", "update", "finish")] == [4.0, 6.0, 7.0]


async def test_undoing_an_update_takes_the_time_that_it_needs(rig: Rig) -> None:
    """Whatever the call was given that failed."""
    rig.engine.backend = "scripted"
    rig.engine.fails["transfer_update"] = GenserveError("no")
    await rig.transfers.start(UpdateOptions())
    with pytest.raises(PushRolledBackError):
        await finish(rig)
    given_s = rig.engine.timeouts_s
    assert [given_s[step] for step in ("transfer_abandon", "prepare_weights", "commit_weights", "discard_weights")] == [
        ABANDON_S,
        HEAL_S,
        HEAL_S,
        DISCARD_S,
    ]
    assert rig.engine.live == tensors(0)


class Clock:
    """The loop's, which stands still unless it is put forward. `waits` is set when somebody waits for a stream."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s, self.waits = 0.0, asyncio.Event()
        loop, changed = asyncio.get_running_loop(), rig.registry.live.changed
        wait = changed.wait
        now_s = loop.time()

        async def wait_change() -> None:
            self.waits.set()
            await wait()

        monkeypatch.setattr(loop, "time", lambda: now_s + self.ahead_s)
        monkeypatch.setattr(changed, "wait", wait_change)

    async def forward(self, seconds: float) -> None:
        """And whatever is due then happens."""
        self.ahead_s += seconds
        for _ in range(50):
            await asyncio.sleep(0)


@pytest.fixture
async def clock(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(rig, monkeypatch)


async def opening(rig: Rig, clock: Clock, opened: PushHeader) -> "asyncio.Task[PushStream]":
    """Waits for somebody."""
    clock.waits.clear()
    task = asyncio.create_task(rig.registry.open(opened))
    await clock.waits.wait()
    return task


@pytest.mark.parametrize(("ttl_s", "waits_s"), [(300.0, 30.0), (12.0, 12.0)])
async def test_stream_with_a_digest_waits_30_s_for_the_one_with_the_manifest(
    rig: Rig, clock: Clock, ttl_s: float, waits_s: float
) -> None:
    """They race. It does not wait for longer than its bytes would be kept."""
    task = await opening(rig, clock, further(header(staging_ttl_s=ttl_s)))
    await clock.forward(waits_s - 0.01)
    assert not task.done()
    await clock.forward(0.02)
    assert task.done()
    with pytest.raises(PushNotFoundError):
        await task


async def test_an_attempt_waits_two_seconds_for_the_streams_of_another_one(rig: Rig, clock: Clock) -> None:
    """Whose client may just have gone. After that they conflict, and the push is over for both."""
    first = await rig.registry.open(header(attempt="a"))
    task = await opening(rig, clock, header(attempt="b"))
    await clock.forward(1.99)
    assert not task.done()
    await clock.forward(0.02)
    assert task.done()
    with pytest.raises(PushConflictError):
        await task
    with pytest.raises(PushConflictError):
        first.write(0, b"x", None)
    first.detach()


async def test_attempt_begins_as_soon_as_the_others_streams_have_ended(rig: Rig, clock: Clock) -> None:
    """It does not wait for the time to be over."""
    first = await rig.registry.open(header(attempt="a"))
    task = await opening(rig, clock, header(attempt="b"))
    first.detach()
    stream = await task
    assert clock.ahead_s == 0.0
    send(stream, weights(1))
    await stream.finish()
    stream.detach()
    assert rig.engine.live == tensors(1)
