"""Sleep and wake-up, among pauses."""

import asyncio

import pytest

from genserve.control.asleep import SleepDepth
from genserve.control.conditions import Phase
from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import DeadlineError, EngineDeadError, EngineSleepingError, EngineTaintedError, UnsupportedError
from tests.support.clocks import advanced_clock
from tests.support.patience import until
from tests.support.phases import enter_phase
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.control.conftest import Rig

SLEEP_1 = "sleep 1 scheduling+weights+kv_cache"
WAKE_ALL = "wake_up scheduling+weights+kv_cache"
WAKE_UP = ["wake_up weights", "wake_up scheduling+kv_cache"]
"""The weights first, alone: vLLM runs as soon as it has woken the last part."""


async def test_nothing_but_a_wake_up_reaches_a_sleeping_engine(rig: Rig) -> None:
    """Pauses and pushes are refused; a repeat of the sleep answers as the first."""
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 60.0)
    assert rig.board.phase is Phase.SLEEPING
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 60.0)
    with pytest.raises(EngineSleepingError):
        await rig.pause()
    with pytest.raises(EngineSleepingError):
        async with rig.pauses.hold(PauseMode.KEEP, KvPolicy.REUSE, timeout_s=60.0):
            pass
    await rig.pauses.resume("", force=True)
    assert rig.engine.calls == ["pause keep reuse", SLEEP_1]
    await rig.sleeps.wake_up()
    await rig.sleeps.wake_up()
    assert rig.board.phase is Phase.RUNNING
    assert rig.engine.running
    assert rig.engine.calls == ["pause keep reuse", SLEEP_1, *WAKE_UP]


@pytest.mark.parametrize("mode", PauseMode)
async def test_a_sleep_stops_requests_as_its_mode_says(rig: Rig, mode: PauseMode) -> None:
    """By a pause of that mode: the sleep itself finds the engine still."""
    await rig.sleeps.sleep(mode, SleepDepth(), 60.0)
    assert rig.engine.calls == [f"pause {mode.value} reuse", SLEEP_1]


@pytest.mark.usefixtures("leaping_clock")
async def test_a_sleep_that_waits_in_vain_never_sleeps(rig: Rig) -> None:
    """The engine runs on, and is not put to sleep when the last request ends later."""
    rig.engine.hangs.add("pause")
    with pytest.raises(DeadlineError):
        await rig.sleeps.sleep(PauseMode.WAIT, SleepDepth(), 60.0)
    assert rig.engine.calls == ["pause wait reuse", "resume"]
    assert rig.engine.running
    assert rig.board.phase is Phase.RUNNING


async def test_two_sleeps_at_a_time_are_one(rig: Rig) -> None:
    """The second finds the engine asleep when it is its turn."""
    gate = rig.engine.gates["sleep"] = Gate()
    sleeping = [asyncio.create_task(rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(0, ()), 60.0)) for _ in range(2)]
    await gate.reached.wait()
    gate.open.set()
    await asyncio.gather(*sleeping)
    assert rig.engine.calls == ["pause keep reuse", "sleep 0 scheduling"]


async def test_an_engine_that_woke_up_can_be_paused(rig: Rig) -> None:
    """It does not count as paused because it stood still before its sleep."""
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 60.0)
    await rig.sleeps.wake_up()
    await rig.pause()
    assert not rig.engine.running


async def test_lease_outlives_a_sleep(rig: Rig) -> None:
    """Whoever paused before finds the engine paused after it, and resumes it."""
    grant = await rig.pause()
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 60.0)
    await rig.sleeps.wake_up()
    assert rig.board.phase is Phase.PAUSED
    assert not rig.engine.running
    await rig.pauses.resume(grant.lease_id)
    assert rig.engine.running


async def test_lease_that_ends_during_a_sleep_does_not_wake_the_engine(rig: Rig) -> None:
    """Its memory is not there."""
    await rig.pause(ttl_s=60.0)
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 60.0)
    with advanced_clock() as clock:
        await clock.advance(61.0)
        await until(lambda: not rig.leases.active)
    assert not rig.engine.running
    await rig.sleeps.wake_up()
    assert rig.engine.running


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.usefixtures("leaping_clock")
async def test_sleep_that_fails_leaves_the_engine_as_it_was(rig: Rig, paused: bool) -> None:
    """It may sleep by then, so it is woken up; then it runs, or is paused under its lease."""
    if paused:
        await rig.pause()
    rig.engine.fails["sleep"] = DeadlineError("late")
    with pytest.raises(DeadlineError):
        await rig.sleeps.sleep(PauseMode.WAIT, SleepDepth(), 60.0)
    assert rig.engine.running is not paused
    assert rig.board.phase is (Phase.PAUSED if paused else Phase.RUNNING)
    woken = f"{WAKE_ALL} paused" if paused else WAKE_ALL
    assert rig.engine.calls[rig.engine.calls.index(SLEEP_1) :] == [SLEEP_1, woken]


@pytest.mark.usefixtures("leaping_clock")
async def test_cancelled_sleep_is_undone(rig: Rig) -> None:
    """A client that goes away leaves the engine awake and running."""
    gate = rig.engine.gates["sleep"] = Gate()
    sleeping = asyncio.create_task(rig.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 60.0))
    await gate.reached.wait()
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    assert rig.engine.calls[-1] == WAKE_ALL
    assert rig.engine.running
    assert rig.board.phase is Phase.RUNNING
    await rig.pause()
    assert not rig.engine.running


async def test_unsupported_sleep_touches_nothing(rig: Rig) -> None:
    """The daemon was started without it."""
    rig.engine.can_sleep = False
    with refuses(UnsupportedError, says="--enable-sleep-mode"):
        await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 60.0)
    assert rig.engine.calls == []


@pytest.mark.usefixtures("leaping_clock")
async def test_wake_up_that_fails_can_be_repeated(rig: Rig) -> None:
    """It sleeps on."""
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 60.0)
    rig.engine.fails["wake_up"] = DeadlineError("late")
    with pytest.raises(DeadlineError):
        await rig.sleeps.wake_up()
    assert rig.board.phase is Phase.SLEEPING
    await rig.sleeps.wake_up()
    assert rig.engine.running


async def test_an_engine_that_dies_of_a_sleep_is_asked_for_nothing_more(rig: Rig) -> None:
    """Whoever watches it ends the daemon: there is nothing to undo."""
    rig.engine.fails["sleep"] = EngineDeadError("it has died")
    with pytest.raises(EngineDeadError):
        await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 60.0)
    assert rig.engine.calls[-1] == SLEEP_1


async def test_an_engine_that_dies_of_its_wake_up_is_asked_for_nothing_more(rig: Rig) -> None:
    """Pausing it again would wait for an answer, and tell of another error."""
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 60.0)
    await rig.sleeps.wake_up(["weights"])
    rig.engine.fails["wake_up"] = EngineDeadError("it has died")
    with pytest.raises(EngineDeadError):
        await rig.sleeps.wake_up()
    assert rig.engine.calls[-2:] == WAKE_UP


async def test_tainted_engine_does_not_sleep(rig: Rig) -> None:
    """Its wake-up would run it."""
    enter_phase(rig.board, Phase.TAINTED)
    with pytest.raises(EngineTaintedError):
        await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 60.0)


async def test_weights_alone_fall_asleep_between_pushes(rig: Rig) -> None:
    """The one that is applied ends first, within the time of the call; the KV cache does not wait for it."""
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(None, ["kv_cache"]), 60.0)
    assert rig.resident.waits_s == []
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 4.0)
    assert rig.resident.waits_s == [4.0]
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 3.0)
    assert rig.resident.waits_s == [4.0], "they sleep already"
    assert not rig.resident.is_between
    await rig.sleeps.wake_up()
    assert rig.resident.waits_s == [4.0], "nothing is restored"
