"""The pause controller, on an engine that fails and hangs where the test says."""

import asyncio

import pytest

from genserve.control.conditions import Phase
from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import (
    DeadlineError,
    DrainingError,
    EngineDeadError,
    EngineSleepingError,
    GenserveError,
    InvalidFieldError,
    PauseLeaseLostError,
)
from tests.support.clocks import advanced_clock, leaping_clock
from tests.support.patience import STEP_S, turns, until
from tests.support.phases import enter_phase
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.control.conftest import Rig


async def test_engine_stands_still_from_the_first_lease_to_the_last(rig: Rig) -> None:
    """Two holders: the engine is paused once, and runs when both have given their leases back."""
    first, second = await rig.pause(), await rig.pause()
    assert (first.counts.kept, first.counts.aborted) == (5, 0)
    assert not rig.engine.running
    assert rig.board.phase is Phase.PAUSED
    assert await rig.pauses.resume(first.lease_id) is False
    assert not rig.engine.running
    assert await rig.pauses.resume(second.lease_id) is False
    assert rig.engine.running
    assert rig.board.phase is Phase.RUNNING
    assert rig.engine.calls == ["pause keep reuse", "resume"]


async def test_repeated_pause_answers_as_the_first(rig: Rig) -> None:
    """The same request id: the same lease and counts, and no second call of the engine."""
    first = await rig.pause(PauseMode.ABORT, request_id="r")
    assert await rig.pause(PauseMode.ABORT, request_id="r") == first
    assert rig.engine.calls == ["pause abort reuse"]


async def test_nothing_reaches_the_engine_during_an_undisturbed_call(rig: Rig) -> None:
    """A pause and a push's hold wait for it, until their own deadline."""
    async with rig.pauses.undisturbed(60.0):
        pausing = asyncio.create_task(rig.pause(timeout_s=600.0))
        with leaping_clock(), pytest.raises(DeadlineError):
            async with rig.pauses.hold(PauseMode.KEEP, KvPolicy.REUSE, timeout_s=60.0):
                pass
        assert rig.engine.calls == []
    await pausing
    assert rig.engine.calls == ["pause keep reuse"]


async def test_wait_joins_a_pause_at_once(rig: Rig) -> None:
    """Frozen requests cannot finish, so WAIT on a paused engine is KEEP: it would wait for ever."""
    await rig.pause()
    assert (await rig.pause(PauseMode.WAIT)).counts.kept == 5  # running and waiting, as the engine's load says
    assert rig.engine.calls == ["pause keep reuse"]


async def test_abort_joining_a_pause_ends_the_frozen_requests(rig: Rig) -> None:
    """ABORT does what it says also when somebody has paused before."""
    await rig.pause()
    assert (await rig.pause(PauseMode.ABORT)).counts.aborted == 5
    assert rig.engine.calls == ["pause keep reuse", "pause abort reuse"]


async def test_recompute_joining_a_pause_drops_the_cache(rig: Rig) -> None:
    """The pause that holds may have kept it: keys and values, those in connectors, and embeddings of images."""
    await rig.pause()
    await rig.pause(kv_policy=KvPolicy.RECOMPUTE)
    assert rig.engine.calls == ["pause keep reuse", "reset_caches"]


@pytest.mark.parametrize("failure", [DeadlineError("late"), RuntimeError("broken")])
@pytest.mark.usefixtures("leaping_clock")
async def test_failed_pause_leaves_no_lease_and_a_running_engine(rig: Rig, failure: Exception) -> None:
    """Whatever went wrong, nothing is paused, and the next pause works."""
    rig.engine.fails["pause"] = failure
    with pytest.raises(type(failure)):
        await rig.pause()
    assert rig.engine.calls == ["pause keep reuse", "resume"]
    assert rig.engine.running
    assert rig.leases.active == ()
    await rig.pause()
    assert not rig.engine.running


@pytest.mark.parametrize("joins", [False, True])
async def test_an_engine_that_dies_of_a_pause_is_asked_for_nothing_more(rig: Rig, joins: bool) -> None:
    """There is nothing to undo, and no answer would come."""
    if joins:
        await rig.pause()
    step = "reset_caches" if joins else "pause"
    rig.engine.fails[step] = EngineDeadError("it has died")
    with pytest.raises(EngineDeadError):
        await rig.pause(kv_policy=KvPolicy.RECOMPUTE)
    assert rig.engine.calls[-1].partition(" ")[0] == step


@pytest.mark.usefixtures("leaping_clock")
async def test_pause_that_waits_for_an_endless_request_times_out_unpaused(rig: Rig) -> None:
    """WAIT with a request that does not end: DEADLINE_EXCEEDED, no lease, running."""
    rig.engine.hangs.add("pause")
    with pytest.raises(DeadlineError):
        await rig.pause(PauseMode.WAIT, timeout_s=60.0)
    assert rig.engine.running
    assert rig.leases.active == ()


@pytest.mark.usefixtures("leaping_clock")
async def test_cancelled_pause_is_undone(rig: Rig) -> None:
    """A client that goes away while its pause takes hold leaves nothing paused, even if it is cancelled twice."""
    rig.engine.gates["pause"], rig.engine.gates["resume"] = Gate(), Gate()
    pausing = asyncio.create_task(rig.pause())
    await rig.engine.gates["pause"].reached.wait()
    assert "pause" in {task.get_name() for task in asyncio.all_tasks()}
    pausing.cancel()
    await rig.engine.gates["resume"].reached.wait()
    pausing.cancel()
    await turns()
    assert not pausing.done()  # the undoing is not left half done
    rig.engine.gates["resume"].open.set()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert rig.leases.active == ()
    assert rig.engine.running
    assert "pause" not in {task.get_name() for task in asyncio.all_tasks()}  # its call to the engine has ended too


@pytest.mark.usefixtures("leaping_clock")
async def test_failed_abort_joining_a_pause_leaves_the_engine_paused(rig: Rig) -> None:
    """An engine undoes its failed pause by running; the lease of the other holder still says that it may not."""
    await rig.pause()
    rig.engine.fails["pause"] = DeadlineError("late")
    with pytest.raises(DeadlineError):
        await rig.pause(PauseMode.ABORT)
    assert rig.engine.calls[-1] == "pause keep reuse"
    assert not rig.engine.running
    assert len(rig.leases.active) == 1


async def test_expired_lease_resumes_the_engine(rig: Rig) -> None:
    """A trainer that was killed does not leave the server paused; resuming later is OK and says what happened."""
    with advanced_clock() as clock:
        grant = await rig.pause(ttl_s=60.0)
        await clock.advance(30.0)
        assert not rig.engine.running
        await clock.advance(31.0)
        await until(lambda: rig.engine.running)
    assert rig.leases.active == ()
    assert await rig.pauses.resume(grant.lease_id) is True


async def test_renewed_lease_outlives_its_first_time(rig: Rig) -> None:
    """The background task sleeps by the lease's new end, longer or shorter."""
    with advanced_clock() as clock:
        grant = await rig.pause(ttl_s=60.0)
        rig.pauses.renew(grant.lease_id, 600.0)
        await clock.advance(300.0)
        assert not rig.engine.running
        rig.pauses.renew(grant.lease_id, 60.0)
        await clock.advance(61.0)
        await until(lambda: rig.engine.running)


async def test_expiry_of_one_lease_leaves_the_pause_of_another(rig: Rig) -> None:
    """The engine runs when no lease is left, not when one is gone."""
    await rig.pause(ttl_s=60.0)
    await rig.pause(ttl_s=600.0)
    with advanced_clock() as clock:
        await clock.advance(61.0)
        await until(lambda: len(rig.leases.active) == 1)
    assert not rig.engine.running


async def test_engine_that_cannot_be_resumed_ends_the_background_task(rig: Rig) -> None:
    """Nobody would be served any more: the error comes out of run(), which stops the daemon. Here at an expiry..."""
    rig.engine.fails["resume"] = RuntimeError("broken")
    await rig.pause(ttl_s=60.0)
    with advanced_clock() as clock:
        await clock.advance(61.0)
        with pytest.raises(RuntimeError, match="broken"):
            await asyncio.wait_for(asyncio.shield(rig.background), STEP_S)


async def test_failed_resume_of_a_caller_ends_the_background_task_too(rig: Rig) -> None:
    """...and here when a caller resumes, who gets the error as well."""
    grant = await rig.pause()
    rig.engine.fails["resume"] = DeadlineError("late")
    with pytest.raises(DeadlineError):
        await rig.pauses.resume(grant.lease_id)
    with pytest.raises(DeadlineError):
        await asyncio.wait_for(asyncio.shield(rig.background), STEP_S)


async def test_resume_by_somebody_without_a_lease_is_refused(rig: Rig) -> None:
    """Only a lease's id, or force, resumes."""
    await rig.pause()
    with pytest.raises(PauseLeaseLostError):
        await rig.pauses.resume("somebody else's")
    with pytest.raises(InvalidFieldError):
        await rig.pauses.resume("")
    assert not rig.engine.running


async def test_double_resume_is_defined(rig: Rig) -> None:
    """The second answers as the first and touches nothing, even while another lease is held."""
    first = await rig.pause()
    await rig.pauses.resume(first.lease_id)
    await rig.pause()
    assert await rig.pauses.resume(first.lease_id) is False
    assert not rig.engine.running


async def test_force_ends_every_lease(rig: Rig) -> None:
    """With any id, and their holders learn it."""
    first, second = await rig.pause(), await rig.pause(ttl_s=None)
    assert await rig.pauses.resume("", force=True) is False
    assert rig.engine.running
    assert rig.leases.active == ()
    for grant in (first, second):
        assert await rig.pauses.resume(grant.lease_id, force=True) is True


@pytest.mark.parametrize(
    ("phase", "error"),
    [(Phase.DRAINING, DrainingError), (Phase.DEAD, EngineDeadError), (Phase.SLEEPING, EngineSleepingError)],
)
async def test_pause_is_refused_by_phase(rig: Rig, phase: Phase, error: type[GenserveError]) -> None:
    """And the engine is not touched."""
    enter_phase(rig.board, phase)
    with pytest.raises(error):
        await rig.pause()
    assert rig.engine.calls == []


async def test_tainted_engine_may_be_paused_but_never_resumed(rig: Rig) -> None:
    """No token is sampled from weights that are not known, whoever resumes and however."""
    grant = await rig.pause()
    enter_phase(rig.board, Phase.TAINTED)
    await rig.pauses.resume(grant.lease_id)
    await rig.pauses.resume((await rig.pause()).lease_id, force=True)
    assert not rig.engine.running
    assert "resume" not in rig.engine.calls


async def test_draining_lets_paused_requests_finish(rig: Rig) -> None:
    """A resume is not refused at a shutdown: the requests that it drains may be frozen."""
    grant = await rig.pause()
    enter_phase(rig.board, Phase.DRAINING)
    await rig.pauses.resume(grant.lease_id)
    assert rig.engine.running


async def test_force_waits_for_a_push_and_ends_the_leases_of_others(rig: Rig) -> None:
    """While a push holds the engine not even Resume(force) runs it: half of the weights may be exchanged."""
    grant = await rig.pause()
    async with rig.pauses.hold(PauseMode.KEEP, KvPolicy.REUSE, timeout_s=60.0):
        forcing = asyncio.create_task(rig.pauses.resume("", force=True))
        await turns()
        assert not forcing.done()
        assert not rig.engine.running
    await forcing
    assert rig.engine.running
    assert await rig.pauses.resume(grant.lease_id) is True


async def test_lease_that_expires_during_a_push_resumes_after_it(rig: Rig) -> None:
    """Expiry waits for the push as everybody does."""
    with advanced_clock() as clock:
        await rig.pause(ttl_s=60.0)
        async with rig.pauses.hold(PauseMode.KEEP, KvPolicy.REUSE, timeout_s=60.0):
            await clock.advance(61.0)
            assert not rig.engine.running
        await until(lambda: rig.engine.running)


async def test_hold_pauses_and_resumes_without_a_lease(rig: Rig) -> None:
    """What a push holds is nobody's lease, and it tells how long generation stood still."""
    with advanced_clock() as clock:
        async with rig.pauses.hold(PauseMode.KEEP, KvPolicy.RECOMPUTE, timeout_s=60.0) as hold:
            assert rig.leases.active == ()
            await clock.advance(20.0)
    assert rig.engine.calls == ["pause keep recompute", "resume"]
    assert hold.paused_s is not None
    assert hold.paused_s >= 20.0


async def test_hold_resumes_when_its_body_fails(rig: Rig) -> None:
    """A push that fails never leaves the engine paused."""
    with pytest.raises(RuntimeError):
        async with rig.pauses.hold(PauseMode.KEEP, KvPolicy.REUSE, timeout_s=60.0):
            raise RuntimeError
    assert rig.engine.running


async def test_hold_under_a_lease_leaves_the_engine_paused(rig: Rig) -> None:
    """The lease goes on, and generation has not run in between, so there is no pause to tell of."""
    grant = await rig.pause()
    async with rig.pauses.hold(PauseMode.KEEP, KvPolicy.RECOMPUTE, timeout_s=60.0, lease_id=grant.lease_id) as hold:
        pass
    assert not rig.engine.running
    assert hold.paused_s is None
    assert rig.engine.calls == ["pause keep reuse", "reset_caches"]


async def test_hold_under_a_lost_lease_is_refused(rig: Rig) -> None:
    """The caller counts on an engine that has not run; that cannot be promised any more."""
    with pytest.raises(PauseLeaseLostError):
        async with rig.pauses.hold(PauseMode.KEEP, KvPolicy.REUSE, timeout_s=60.0, lease_id="lost"):
            pytest.fail("entered")
    assert rig.engine.calls == []


async def test_pause_behind_a_push_times_out_without_a_lease(rig: Rig) -> None:
    """The deadline counts from the call, waiting for the push included."""
    async with rig.pauses.hold(PauseMode.KEEP, KvPolicy.REUSE, timeout_s=60.0):
        with leaping_clock(), pytest.raises(DeadlineError):
            await rig.pause(timeout_s=60.0)
    assert rig.leases.active == ()
    assert rig.engine.running


async def test_resume_on_a_dead_engine_says_so(rig: Rig) -> None:
    """OK would be a lie, forced or not: nothing runs any more."""
    grant = await rig.pause()
    rig.engine.cause_of_death = "EngineCore was ended by SIGKILL"
    enter_phase(rig.board, Phase.DEAD)
    with refuses(EngineDeadError, says="SIGKILL"):
        await rig.pauses.resume(grant.lease_id)
    with refuses(EngineDeadError, says="SIGKILL"):
        await rig.pauses.resume("", force=True)
    with refuses(EngineDeadError, says="SIGKILL"):
        await rig.pause()
    assert rig.engine.calls == ["pause keep reuse"]
