"""The update transaction: all new or all old, and an engine that runs afterwards, whatever fails where."""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from genserve.control.conditions import Phase
from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import (
    DeadlineError,
    DrainingError,
    EngineDeadError,
    EngineTaintedError,
    GenserveError,
    PauseLeaseLostError,
    PushRolledBackError,
)
from genserve.memory.arena import Arena
from genserve.weights.apply import PushApplier
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.outcomes import STEPS
from genserve.weights.push.staging import Staging
from genserve.weights.push.types import ApplyOptions, PushState
from tests.support.clocks import advanced_clock
from tests.support.patience import turns, until
from tests.support.phases import enter_phase
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import MANIFEST, Rig, after, assert_unchanged, header, nothing_runs, tensors, weights
from tests.unit.weights.prepared import state, until_freed


async def test_push_is_applied_while_generation_runs_but_for_the_commit(rig: Rig) -> None:
    """Prepared while running, committed while paused, freed while running again; every step is timed."""
    began_s = time.perf_counter()
    outcome = await rig.push(header())
    elapsed_s = time.perf_counter() - began_s
    assert rig.engine.calls == [
        "prepare_weights",
        "pause keep recompute",
        "commit_weights 1",
        "resume",
        "discard_weights running",
    ]
    assert rig.engine.live == tensors(1)
    assert rig.engine.prepared == {}
    assert outcome.push.state is PushState.APPLIED
    applied = outcome.applied
    assert applied is not None
    assert (applied.previous_version, applied.active_version) == (0, 1)
    assert (applied.requests_kept, applied.requests_aborted) == (5, 0)
    assert tuple(applied.step_s) == STEPS
    assert all(0 < step_s < elapsed_s for step_s in applied.step_s.values())
    assert applied.paused_s is not None
    assert applied.paused_s >= applied.step_s["commit"] + applied.step_s["resume"]


async def test_options_reach_the_pause(rig: Rig) -> None:
    """Mode and cache policy as the header says."""
    options = ApplyOptions(pause_mode=PauseMode.ABORT, kv_policy=KvPolicy.REUSE)
    outcome = await rig.push(header(apply=options))
    assert "pause abort reuse" in rig.engine.calls
    assert outcome.applied is not None
    assert outcome.applied.requests_aborted == 5


async def test_board_says_applying_only_in_the_pause(rig: Rig) -> None:
    """While workers prepare, generation runs and the board says so."""
    prepare, commit = rig.engine.gates["prepare_weights"], rig.engine.gates["commit_weights"] = Gate(), Gate()
    pushing = asyncio.create_task(rig.push(header()))
    await prepare.reached.wait()
    assert rig.board.phase is Phase.RUNNING
    assert rig.registry.report("p1").push.state is PushState.PREPARING
    prepare.open.set()
    await commit.reached.wait()
    assert rig.board.phase is Phase.APPLYING
    assert rig.registry.report("p1").push.state is PushState.APPLYING
    commit.open.set()
    await pushing
    assert rig.board.phase is Phase.RUNNING


@pytest.mark.parametrize(
    ("step", "failure", "raised"),
    [
        ("prepare_weights", PushRolledBackError("no"), PushRolledBackError),
        ("prepare_weights", DeadlineError("late"), DeadlineError),
        ("prepare_weights", EngineDeadError("gone"), EngineDeadError),
        ("pause", DeadlineError("late"), DeadlineError),
        ("pause", EngineDeadError("gone"), EngineDeadError),
        ("commit_weights", PushRolledBackError("no"), PushRolledBackError),
        ("commit_weights", DeadlineError("late, and undone"), DeadlineError),
    ],
)
async def test_failed_step_changes_nothing(
    rig: Rig, step: str, failure: GenserveError, raised: type[GenserveError]
) -> None:
    """The error comes as it is, the version before is served, nothing stays behind, and the push is FAILED."""
    rig.engine.fails[step] = failure
    with pytest.raises(raised):
        await rig.push(header())
    await assert_unchanged(rig)
    report = rig.registry.report("p1").push
    assert report.state is PushState.FAILED
    assert report.issues[0].description == str(failure)


@pytest.mark.parametrize("step", ["prepare_weights", "pause"])
async def test_unknown_error_before_the_commit_is_a_rollback(rig: Rig, step: str) -> None:
    """The trainer gets ABORTED / PUSH_ROLLED_BACK with the text, not an internal error."""
    rig.engine.fails[step] = RuntimeError("size mismatch at layer 3")
    with refuses(PushRolledBackError, says="size mismatch at layer 3"):
        await rig.push(header())
    await assert_unchanged(rig)


@pytest.mark.parametrize("failure", [EngineTaintedError("half"), RuntimeError("what?")])
@pytest.mark.parametrize("served", [0, 1])
async def test_commit_that_cannot_be_undone_is_healed_with_the_resident_bytes(
    rig: Rig, served: int, failure: Exception
) -> None:
    """Those of the checkpoint's files before the first push, and of the last push afterwards; in the same pause. So it
    is after an error that tells nothing of the weights."""
    for version in range(1, served + 1):
        await rig.push(header(f"served {version}", version))
    rig.engine.calls.clear()
    rig.engine.fails["commit_weights"] = failure
    rig.engine.live = {"a": b"mixed"}
    with refuses(PushRolledBackError, says=f"version {served} "):
        await rig.push(header("failing", 5))
    assert rig.engine.live == tensors(served)
    assert rig.engine.weight_version == served
    assert rig.engine.calls.count("resume") == 1
    assert rig.engine.calls[-2] == "resume"  # after the healing; a discard follows
    assert rig.board.phase is Phase.RUNNING
    await rig.push(header("next", 6))
    assert rig.engine.live == tensors(6)


@pytest.mark.parametrize("failure", [EngineTaintedError("half"), RuntimeError("what?")])
async def test_commit_that_can_neither_be_undone_nor_healed_taints(rig: Rig, failure: Exception) -> None:
    """Nothing is resident: the engine stands still and says TAINTED."""
    rig.resident.release_memory()
    rig.engine.fails["commit_weights"] = failure
    with pytest.raises(EngineTaintedError):
        await rig.push(header())
    assert rig.board.phase is Phase.TAINTED
    assert not rig.engine.running
    assert "resume" not in rig.engine.calls


async def test_healing_that_fails_taints(rig: Rig) -> None:
    """The bytes are here, but a worker cannot prepare them."""
    gate = rig.engine.gates["commit_weights"] = Gate()
    rig.engine.fails["commit_weights"] = EngineTaintedError("half")
    pushing = asyncio.create_task(rig.push(header()))
    await gate.reached.wait()
    rig.engine.fails["prepare_weights"] = PushRolledBackError("no memory")
    gate.open.set()
    with refuses(EngineTaintedError, says="no memory"):
        await pushing
    assert rig.board.phase is Phase.TAINTED
    assert not rig.engine.running


async def test_commit_that_hangs_is_the_end_of_the_engine(rig: Rig) -> None:
    """Whoever pushes gets DEADLINE_EXCEEDED on time, before the engine is given up; and one that may be half committed
    is not resumed."""
    gate = rig.engine.gates["commit_weights"] = Gate()
    rig.engine.fails["commit_weights"] = EngineDeadError("given up")
    with advanced_clock() as clock, pytest.raises(DeadlineError):
        await after(clock, 61.0, rig.push(header(apply=ApplyOptions(timeout_s=60.0))), gate.reached.is_set)
    assert rig.board.phase is Phase.APPLYING
    gate.open.set()
    await until(lambda: rig.board.phase is not Phase.APPLYING)
    assert rig.board.phase is Phase.DEAD
    assert not rig.engine.running
    assert "resume" not in rig.engine.calls


async def test_full_push_heals_a_tainted_engine(rig: Rig) -> None:
    """And a failed attempt at it leaves the engine tainted and still."""
    rig.resident.release_memory()
    rig.engine.fails["commit_weights"] = EngineTaintedError("half")
    with pytest.raises(EngineTaintedError):
        await rig.push(header())
    rig.engine.fails["commit_weights"] = PushRolledBackError("no")
    with pytest.raises(PushRolledBackError):
        await rig.push(header("p2"))
    assert rig.board.phase is Phase.TAINTED
    assert not rig.engine.running
    await rig.push(header("p3"))
    assert rig.board.phase is Phase.RUNNING
    assert rig.engine.running
    assert rig.engine.live == tensors(1)


@pytest.mark.parametrize("step", ["prepare_weights", "pause"])
async def test_deadline_is_that_of_all_steps(rig: Rig, step: str) -> None:
    """A step that hangs gets what the steps before have left, and nothing changes."""
    rig.engine.hangs.add(step)
    pushing = rig.push(header(apply=ApplyOptions(timeout_s=60.0)))
    with advanced_clock() as clock:
        with pytest.raises(DeadlineError):
            await after(clock, 60.0, pushing, lambda: step in rig.engine.timeouts_s)
        assert rig.engine.timeouts_s[step] <= 60.0
        rig.engine.hangs.clear()
        await until_freed(rig)  # the push may be answered before
    await assert_unchanged(rig)


async def test_no_commit_is_begun_without_time(rig: Rig) -> None:
    """A slow preparation that used everything up ends the push before the pause."""
    gate = rig.engine.gates["prepare_weights"] = Gate()
    with advanced_clock() as clock:
        with pytest.raises(DeadlineError):
            await after(clock, 61.0, rig.push(header(apply=ApplyOptions(timeout_s=60.0))), gate.reached.is_set)
        gate.open.set()
        await until_freed(rig)
    assert rig.engine.calls == ["prepare_weights", "discard_weights running"]
    await assert_unchanged(rig)


async def test_push_under_a_lease_leaves_the_engine_paused(rig: Rig) -> None:
    """The trainer that paused goes on with its lease; generation was not paused by the push."""
    grant = await rig.pauses.pause(PauseMode.KEEP, KvPolicy.REUSE, holder="t", ttl_s=60.0, timeout_s=60.0)
    outcome = await rig.push(header(apply=ApplyOptions(pause_lease_id=grant.lease_id)))
    assert not rig.engine.running
    assert rig.board.phase is Phase.PAUSED
    assert outcome.applied is not None
    assert outcome.applied.paused_s is None
    await rig.pauses.resume(grant.lease_id)
    assert rig.engine.running


async def test_push_under_a_lost_lease_is_refused_before_it_is_prepared(rig: Rig) -> None:
    """The work of minutes is not begun for nothing."""
    with pytest.raises(PauseLeaseLostError):
        await rig.push(header(apply=ApplyOptions(pause_lease_id="lost")))
    assert rig.engine.calls == []


async def test_lease_lost_during_the_preparation_ends_the_push(rig: Rig) -> None:
    """Requests have run in between, which is what the lease was to prevent."""
    grant = await rig.pauses.pause(PauseMode.KEEP, KvPolicy.REUSE, holder="t", ttl_s=60.0, timeout_s=60.0)
    gate = rig.engine.gates["prepare_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(header(apply=ApplyOptions(pause_lease_id=grant.lease_id))))
    await gate.reached.wait()
    await rig.pauses.resume(grant.lease_id)
    gate.open.set()
    with pytest.raises(PauseLeaseLostError):
        await pushing
    await assert_unchanged(rig)


async def test_force_does_not_run_the_engine_in_the_middle_of_a_commit(rig: Rig) -> None:
    """Resume(force) waits; the scripted engine tells of a resume during a commit as a misuse."""
    gate = rig.engine.gates["commit_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(header()))
    await gate.reached.wait()
    forcing = asyncio.create_task(rig.pauses.resume("", force=True))
    await turns()
    assert not forcing.done()
    gate.open.set()
    await pushing
    await forcing
    assert rig.engine.running


async def test_draining_that_begins_during_the_preparation_ends_the_push_whole(rig: Rig) -> None:
    """At a shutdown nothing is committed any more."""
    gate = rig.engine.gates["prepare_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(header()))
    await gate.reached.wait()
    enter_phase(rig.board, Phase.DRAINING)
    gate.open.set()
    with pytest.raises(DrainingError):
        await pushing
    assert rig.engine.live == tensors(0)
    assert rig.engine.prepared == {}


async def test_cancelled_commit_is_carried_through(rig: Rig) -> None:
    """Only a loop that is torn down cancels it: all new, and running, before the cancellation is raised."""
    gate = rig.engine.gates["commit_weights"] = Gate()
    staging = Staging("p1", MANIFEST, Arena.allocate(MANIFEST.total_bytes))
    staging.write(0, weights(1), None)
    push = LivePush(header(), MANIFEST.digest, staging, MANIFEST.total_bytes)
    push.lifecycle.go("checking")
    push.lifecycle.go("staged")
    push.lifecycle.go("preparing")
    applying = asyncio.create_task(PushApplier(rig.engine, rig.pauses, rig.board, rig.resident).apply(push))
    await gate.reached.wait()
    applying.cancel()
    await turns()
    assert not applying.done()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await applying
    push.close()
    assert rig.engine.live == tensors(1)
    assert rig.engine.running
    assert rig.board.phase is Phase.RUNNING


async def test_engine_that_does_not_resume_after_the_commit_is_told_as_it_is(rig: Rig) -> None:
    """The new version is live, so nobody may read "nothing changed"; the daemon ends, as nobody is served."""
    rig.engine.fails["resume"] = DeadlineError("late")
    with refuses(GenserveError):  # neither of the classes that say so
        await rig.push(header())
    assert rig.engine.live == tensors(1)
    with pytest.raises(DeadlineError):
        await rig.pauses.run()
    rig.background[0].exception()  # the fixture's own task of it has ended so too
    rig.background.clear()


async def test_push_is_answered_before_what_it_replaced_is_freed(rig: Rig) -> None:
    """The next one is prepared after that."""
    gate = rig.engine.gates["discard_weights"] = Gate()
    outcome = await rig.push(header())
    assert outcome.push.state is PushState.APPLIED
    await gate.reached.wait()
    pushing = asyncio.create_task(rig.push(header("p2", 2)))
    try:
        with advanced_clock() as clock, refuses(DeadlineError, says="'p1' replaced"):
            await after(clock, 6.0, rig.applier.between_pushes(5.0).__aenter__())
        assert rig.engine.calls.count("prepare_weights") == 1
    finally:
        del rig.engine.gates["discard_weights"]
        gate.open.set()
    assert (await pushing).push.state is PushState.APPLIED
    assert rig.engine.calls[4:6] == ["discard_weights running", "prepare_weights"]


@pytest.mark.parametrize("busy_with", ["another push", "another call"])
async def test_push_reports_how_long_it_waited_for_others(rig: Rig, busy_with: str) -> None:
    """For the push before it, or for a call that has the engine."""
    with advanced_clock() as clock:
        async with AsyncExitStack() as busy:
            others_turn = rig.applier.between_pushes(30.0) if busy_with == "another push" else rig.pauses.turn.take()
            await busy.enter_async_context(others_turn)
            pushing = asyncio.create_task(rig.push(header()))
            await until(lambda: "p1" in rig.registry.live and state(rig) is not PushState.RECEIVING)
            await nothing_runs()  # it waits for its turn
            await clock.advance(5.0)
        applied = (await pushing).applied
    assert applied is not None and applied.step_s["wait"] >= 5.0


async def test_failed_discard_does_not_undo_an_applied_push(rig: Rig) -> None:
    """The version is served; that memory is lost is for the log."""
    rig.engine.fails["discard_weights"] = RuntimeError("no")
    assert (await rig.push(header())).push.state is PushState.APPLIED
    assert rig.engine.running
    async with rig.applier.between_pushes(30.0):  # the next one need not wait for ever
        assert rig.engine.calls[-1] == "discard_weights running"
