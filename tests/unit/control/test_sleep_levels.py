"""Sleeping and waking up part by part, and weights that a sleep has dropped."""

import asyncio

import pytest

from genserve.control.asleep import SleepDepth
from genserve.control.conditions import EngineCondition, Phase
from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import (
    DeadlineError,
    EngineDeadError,
    EngineSleepingError,
    EngineTaintedError,
    GenserveError,
    InvalidFieldError,
)
from tests.support.patience import STEP_S, turns
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.control.conftest import Rig

pytestmark = pytest.mark.usefixtures("leaping_clock")

DROPPED = SleepDepth.of(2, ())


async def sleep(rig: Rig, depth: SleepDepth = DROPPED) -> None:
    await rig.sleeps.sleep(PauseMode.KEEP, depth, 60.0)


async def hold(rig: Rig) -> None:
    """What a push does to the engine."""
    async with rig.pauses.hold(PauseMode.KEEP, KvPolicy.REUSE, timeout_s=60.0):
        pass


async def test_dropped_weights_are_restored_before_the_last_part_wakes_up(rig: Rig) -> None:
    """vLLM schedules at once when that is awake; the engine's own check is that nothing ran on what was dropped."""
    await sleep(rig)
    assert rig.board.state().weights_discarded
    await rig.sleeps.wake_up()
    assert rig.engine.calls[2:] == ["wake_up weights", "restore", "wake_up scheduling+kv_cache"]
    assert rig.engine.running
    assert (rig.board.phase, rig.board.state().weights_discarded) == (Phase.RUNNING, False)


async def test_weights_that_were_kept_are_not_restored(rig: Rig) -> None:
    """Level 1 has them on the host."""
    await sleep(rig, SleepDepth.of(1, ()))
    await rig.sleeps.wake_up()
    assert "restore" not in rig.engine.calls


async def test_waking_the_weights_alone_restores_nothing_yet(rig: Rig) -> None:
    """A trainer is about to push; restoring the old version first would be for nothing."""
    await sleep(rig)
    await rig.sleeps.wake_up(["weights"])
    assert rig.engine.calls[2:] == ["wake_up weights"]
    state = rig.board.state()
    assert (state.phase, state.asleep_tags, state.weights_discarded) == (
        Phase.SLEEPING,
        ("scheduling", "kv_cache"),
        True,
    )
    rig.engine.live = {"w": b"pushed"}  # by a push
    rig.board.tell_applied()
    await rig.sleeps.wake_up(["kv_cache"])
    assert "restore" not in rig.engine.calls


async def test_only_with_its_weights_awake_a_sleeping_engine_is_held_for_a_push(rig: Rig) -> None:
    """It does not run afterwards, and takes no pause."""
    await sleep(rig)
    with pytest.raises(EngineSleepingError):
        await hold(rig)
    await rig.sleeps.wake_up(["weights"])
    await hold(rig)
    assert not rig.engine.running
    with pytest.raises(EngineSleepingError):
        await rig.pause()
    await rig.pauses.resume("", force=True)
    assert not rig.engine.running


async def test_a_commit_while_asleep_is_told_as_sleep(rig: Rig) -> None:
    """In APPLYING requests would be let in, and wait for a wake-up that nobody has promised."""
    await sleep(rig)
    await rig.sleeps.wake_up(["weights"])
    rig.board.enter(EngineCondition.APPLYING)
    assert rig.board.phase is Phase.SLEEPING
    rig.board.enter(None)
    assert rig.board.phase is Phase.SLEEPING


async def test_weights_that_cannot_be_restored_are_never_run(rig: Rig) -> None:
    """The engine sleeps on with its weights awake, so that a push can bring some."""
    await sleep(rig)
    rig.resident.fails = EngineTaintedError("no bytes")
    for _ in range(2):
        with pytest.raises(EngineTaintedError):
            await rig.sleeps.wake_up()
    assert not rig.engine.running
    assert rig.board.state().asleep_tags == ("scheduling", "kv_cache")
    assert rig.board.state().weights_discarded
    await hold(rig)


async def test_the_kv_cache_is_not_woken_before_dropped_weights(rig: Rig) -> None:
    """Nothing is asked of the engine."""
    await sleep(rig)
    calls = list(rig.engine.calls)
    with pytest.raises(InvalidFieldError):
        await rig.sleeps.wake_up(["kv_cache"])
    with pytest.raises(InvalidFieldError):
        await rig.sleeps.wake_up(["kv"])
    assert rig.engine.calls == calls


async def test_weights_that_were_kept_may_be_woken_last(rig: Rig) -> None:
    """In one call: there is no part to wake after them."""
    await sleep(rig, SleepDepth())
    await rig.sleeps.wake_up(["kv_cache"])
    with pytest.raises(EngineSleepingError):
        await hold(rig)
    await rig.sleeps.wake_up(["weights"])
    assert rig.engine.calls[2:] == ["wake_up kv_cache", "wake_up scheduling+weights"]
    assert rig.board.phase is Phase.RUNNING


async def test_a_partly_woken_engine_sleeps_again(rig: Rig) -> None:
    """What is asleep is left alone, and dropped weights stay dropped whatever the new level is."""
    await sleep(rig)
    await rig.sleeps.wake_up(["weights"])
    await sleep(rig, SleepDepth.of(1, ()))
    assert rig.engine.calls[-1] == "sleep 1 scheduling+weights"
    assert rig.board.state().weights_discarded
    await rig.sleeps.wake_up()
    assert "restore" in rig.engine.calls


async def test_the_kv_cache_alone_can_be_given_back(rig: Rig) -> None:
    """The weights stay awake: pushes are accepted."""
    await sleep(rig, SleepDepth.of(None, ["kv_cache"]))
    assert rig.engine.calls == ["pause keep reuse", "sleep 0 scheduling+kv_cache"]
    await hold(rig)
    await rig.sleeps.wake_up(["kv_cache"])
    assert rig.engine.running


async def test_level_0_stops_scheduling_only(rig: Rig) -> None:
    """Any wake-up ends it, as in vLLM: all of the memory is awake."""
    await sleep(rig, SleepDepth.of(0, ()))
    assert rig.board.state().asleep_tags == ("scheduling",)
    await hold(rig)
    assert not rig.engine.running
    await rig.sleeps.wake_up(["scheduling"])
    assert rig.engine.calls[-1] == "wake_up scheduling"
    assert rig.engine.running


async def test_scheduling_does_not_wake_up_before_the_memory(rig: Rig) -> None:
    """The call is no error, and changes nothing."""
    await sleep(rig)
    calls = list(rig.engine.calls)
    await rig.sleeps.wake_up(["scheduling"])
    assert rig.engine.calls == calls
    assert rig.board.phase is Phase.SLEEPING
    assert not rig.engine.running


async def test_a_lease_outlives_a_sleep_in_parts(rig: Rig) -> None:
    """The engine stands still again when it has woken up."""
    await rig.pause()
    await sleep(rig)
    await rig.sleeps.wake_up(["weights"])
    await rig.sleeps.wake_up(["kv_cache"])
    assert rig.board.phase is Phase.PAUSED
    assert not rig.engine.running


async def test_a_wake_up_that_fails_at_the_last_part_leaves_nothing_running(rig: Rig) -> None:
    """The engine may be awake by then, while everybody is told that it sleeps, and pushes are let in: it is paused."""
    await sleep(rig, SleepDepth())
    await rig.sleeps.wake_up(["weights"])
    rig.engine.running = True  # the call takes effect, and its answer comes too late
    rig.engine.fails["wake_up"] = DeadlineError("late")
    with pytest.raises(DeadlineError):
        await rig.sleeps.wake_up(["kv_cache"])
    assert not rig.engine.running
    assert rig.board.phase is Phase.SLEEPING
    await rig.sleeps.wake_up()
    assert rig.engine.running


async def test_a_sleep_that_fails_may_have_dropped_the_weights(rig: Rig) -> None:
    """So they are restored while the engine stands still, and then it runs."""
    rig.engine.fails["sleep"] = DeadlineError("late")
    with pytest.raises(DeadlineError):
        await sleep(rig)
    assert rig.engine.calls[2:] == [
        "wake_up weights",
        "pause keep reuse",
        "restore",
        "wake_up scheduling+weights+kv_cache",
    ]
    assert rig.board.phase is Phase.RUNNING
    assert not rig.board.state().weights_discarded


async def test_a_sleep_that_fails_without_a_way_back_sleeps_on(rig: Rig) -> None:
    """Weights that may be dropped, and no bytes to restore them from: a push has to bring some."""
    rig.engine.fails["sleep"] = DeadlineError("late")
    rig.resident.fails = EngineTaintedError("no bytes")
    with pytest.raises(DeadlineError):
        await sleep(rig)
    assert not rig.engine.running
    assert rig.board.phase is Phase.SLEEPING
    assert rig.board.state().weights_discarded
    assert not rig.background.done()


async def test_a_sleep_that_cannot_be_undone_ends_the_daemon(rig: Rig) -> None:
    """Nobody knows what is awake; the caller gets that error."""
    rig.engine.fails |= {"sleep": DeadlineError("late"), "wake_up": RuntimeError("no way back")}
    for failing in (sleep(rig), asyncio.wait_for(rig.background, STEP_S)):
        with pytest.raises(RuntimeError, match="no way back"):
            await failing


async def test_an_engine_that_dies_of_the_undoing_does_not_sleep_on(rig: Rig) -> None:
    """No push can bring anything any more."""
    rig.engine.fails["sleep"] = DeadlineError("late")
    rig.resident.fails = EngineDeadError("it has died")
    for failing in (sleep(rig), asyncio.wait_for(rig.background, STEP_S)):
        with pytest.raises(EngineDeadError):
            await failing


async def test_a_wake_up_behind_the_sleep_that_drops_the_weights_restores_them(rig: Rig) -> None:
    """Between pushes, although nothing was missing when it was called."""
    gate = rig.engine.gates["sleep"] = Gate()
    sleeping = asyncio.create_task(sleep(rig))
    await gate.reached.wait()
    waking = asyncio.create_task(rig.sleeps.wake_up())
    await turns()
    gate.open.set()
    await asyncio.gather(sleeping, waking)
    assert "restore" in rig.engine.calls
    assert (rig.engine.running, rig.board.phase) == (True, Phase.RUNNING)


async def test_a_second_sleep_that_fails_leaves_the_first(rig: Rig) -> None:
    """What slept before sleeps on, and nothing runs."""
    await sleep(rig, SleepDepth.of(None, ["kv_cache"]))
    rig.engine.fails["sleep"] = GenserveError("broken")
    with pytest.raises(GenserveError):
        await sleep(rig, SleepDepth())
    assert rig.engine.calls[-1] == "wake_up weights"
    assert rig.board.state().asleep_tags == ("scheduling", "kv_cache")
    assert not rig.engine.running


async def test_a_tainted_engine_that_sleeps_is_restored_before_it_runs(rig: Rig) -> None:
    """A commit may fail while the engine sleeps, as well as at any other time."""
    await sleep(rig, SleepDepth())
    await rig.sleeps.wake_up(["weights"])
    rig.board.enter(EngineCondition.TAINTED)
    await rig.sleeps.wake_up()
    assert rig.engine.calls[-2:] == ["restore", "wake_up scheduling+kv_cache"]
    assert rig.board.phase is Phase.RUNNING


async def test_a_client_that_goes_away_does_not_stop_a_wake_up_half_way(rig: Rig) -> None:
    """Weights are awake then and of no version: the restoring goes on, and the engine runs."""
    await sleep(rig)
    gate = rig.engine.gates["restore"] = Gate()
    waking = asyncio.create_task(rig.sleeps.wake_up())
    await gate.reached.wait()
    waking.cancel()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await waking
    assert rig.engine.running


async def test_a_dead_engine_is_not_woken_up(rig: Rig) -> None:
    """Nobody is told that it is awake."""
    await sleep(rig)
    rig.engine.cause_of_death = "EngineCore was ended by SIGKILL"
    rig.board.enter(EngineCondition.DEAD)
    with refuses(EngineDeadError, says="SIGKILL"):
        await rig.sleeps.wake_up()
