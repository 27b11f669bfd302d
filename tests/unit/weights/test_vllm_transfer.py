"""Updates through vLLM's own transfer engines: what fails, hangs or is left alone ends with the version before."""

import asyncio
import time

import pytest

from genserve.control.asleep import SleepDepth
from genserve.control.conditions import Phase
from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import (
    ApplyInProgressError,
    DeadlineError,
    EngineDeadError,
    EngineSleepingError,
    EngineTaintedError,
    GenserveError,
    InvalidFieldError,
    NotResidentError,
    PauseLeaseLostError,
    PushRolledBackError,
    UnsupportedError,
    UpdateNotFoundError,
    VersionNotNewerError,
)
from genserve.weights.push.types import PushAction
from genserve.weights.vllm_transfer import UpdateOptions
from tests.support.clocks import advanced_clock
from tests.support.patience import turns, until
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import Rig, header, tensors
from tests.unit.weights.transfers import HALF, finish

NEW = b"0123456789abcdef"


@pytest.fixture
def updating(rig: Rig) -> Rig:
    """With a backend."""
    rig.engine.backend = "scripted"
    return rig


def assert_undone(rig: Rig) -> None:
    """Version 0 is live and runs, pushes may come, and the board says so."""
    assert rig.engine.live == tensors(0)
    assert (rig.engine.weight_version, rig.engine.running) == (0, True)
    assert not rig.engine.transfer.is_open
    assert rig.board.phase is Phase.RUNNING


async def update(rig: Rig) -> None:
    """All calls of an update, with half of the tensors."""
    await rig.transfers.start(UpdateOptions())
    await rig.transfers.update("", HALF, 60.0)
    await finish(rig)


async def test_an_update_stands_still_from_start_to_finish(updating: Rig) -> None:
    """One pause around all calls, and what was received is live by its version."""
    began_s = time.perf_counter()
    await updating.transfers.init("{}", 60.0)
    begun = await updating.transfers.start(UpdateOptions(pause_mode=PauseMode.ABORT, kv_policy=KvPolicy.REUSE))
    assert updating.board.phase is Phase.APPLYING
    await updating.transfers.update(begun.update_id, HALF, 60.0)
    applied = await updating.transfers.finish(begun.update_id, 4, 60.0)
    assert updating.engine.calls == [
        "transfer_init {}",
        "pause abort reuse",
        "transfer_start",
        "transfer_update",
        "transfer_finish",
        "resume",
    ]
    assert updating.engine.live == {**tensors(0), "a": NEW}
    assert (applied.previous_version, applied.active_version, updating.engine.weight_version) == (0, 4, 4)
    assert (applied.requests_kept, applied.requests_aborted) == (0, 5)
    assert list(applied.step_s) == ["wait", "pause", "receive", "commit", "resume"]
    assert all(step_s > 0 for step_s in applied.step_s.values())
    assert sum(applied.step_s.values()) < time.perf_counter() - began_s
    assert applied.paused_s is not None
    assert updating.board.phase is Phase.RUNNING


async def test_without_a_backend_nothing_is_paused(rig: Rig) -> None:
    """Every call is refused."""
    for call in (
        rig.transfers.init("{}", 60.0),
        rig.transfers.start(UpdateOptions()),
        rig.transfers.update("", HALF, 60.0),
        rig.transfers.finish("", None, 60.0),
    ):
        with pytest.raises(UnsupportedError):
            await call
    assert rig.engine.calls == []


async def test_an_update_that_could_not_begin_has_received_nothing(updating: Rig) -> None:
    """Nothing has to be applied anew, also where no bytes are resident: as after every update that was finished."""
    updating.resident.forget("are not here")
    updating.engine.fails["transfer_start"] = DeadlineError("late")
    with refuses(DeadlineError, says="version 0 "):
        await updating.transfers.start(UpdateOptions())
    assert updating.engine.calls[-2:] == ["transfer_abandon", "resume"]
    assert (updating.board.phase, updating.engine.running) == (Phase.RUNNING, True)


@pytest.mark.parametrize("step", ["transfer_update", "transfer_finish"])
@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (GenserveError("no"), PushRolledBackError),
        (ValueError("no"), PushRolledBackError),
        (DeadlineError("no"), DeadlineError),
    ],
)
async def test_a_call_that_fails_ends_the_update(
    updating: Rig, step: str, failure: Exception, raised: type[GenserveError]
) -> None:
    """It is abandoned, and the resident version applied over what is live, in the same pause."""
    updating.engine.fails[step] = failure
    with refuses(raised, says="version 0 "):
        await update(updating)
    assert updating.engine.calls[-5:] == [
        "transfer_abandon",
        "prepare_weights",
        "commit_weights 0",
        "discard_weights paused",
        "resume",
    ]
    assert_undone(updating)
    with pytest.raises(UpdateNotFoundError):
        await finish(updating)
    await updating.push(header())
    assert updating.engine.live == tensors(1)


@pytest.mark.parametrize("step", ["transfer_abandon", "prepare_weights", "commit_weights"])
async def test_what_cannot_be_undone_stands_still(updating: Rig, step: str) -> None:
    """TAINTED: nothing is sampled, and another update is refused."""
    updating.engine.fails = {"transfer_update": GenserveError("no"), step: GenserveError("neither")}
    await updating.transfers.start(UpdateOptions())
    with refuses(EngineTaintedError, says="neither"):
        await updating.transfers.update("", HALF, 60.0)
    assert (updating.board.phase, updating.engine.running) == (Phase.TAINTED, False)
    with pytest.raises(EngineTaintedError):
        await updating.transfers.start(UpdateOptions())


async def test_a_push_heals_what_could_not_be_undone(updating: Rig) -> None:
    """As after a commit that could not be exchanged back."""
    updating.engine.fails = {"transfer_update": GenserveError("no"), "prepare_weights": GenserveError("neither")}
    await updating.transfers.start(UpdateOptions())
    with pytest.raises(EngineTaintedError):
        await updating.transfers.update("", HALF, 60.0)
    await updating.push(header())
    assert (updating.board.phase, updating.engine.running, updating.engine.live) == (Phase.RUNNING, True, tensors(1))


@pytest.mark.parametrize("step", ["transfer_start", "transfer_update", "transfer_finish", "transfer_abandon"])
async def test_an_engine_that_dies_is_dead(updating: Rig, step: str) -> None:
    """Nothing is tried on it any more."""
    updating.engine.fails = {"transfer_finish": GenserveError("no"), step: EngineDeadError("gone")}
    with pytest.raises(EngineDeadError):
        await update(updating)
    assert updating.board.phase is Phase.DEAD
    assert updating.engine.calls[-1] == step


async def test_an_update_that_nobody_goes_on_with_is_undone(updating: Rig) -> None:
    """Its time to live begins anew with every call, and does not run while one is carried out."""
    gate = updating.engine.gates["transfer_update"] = Gate()
    with advanced_clock() as clock:
        begun = await updating.transfers.start(UpdateOptions(ttl_s=60.0))
        receiving = asyncio.create_task(updating.transfers.update("", HALF, 60.0))
        await gate.reached.wait()
        await clock.advance(100.0)
        gate.open.set()
        await receiving
        await clock.advance(30.0)
        assert updating.board.phase is Phase.APPLYING
        await clock.advance(31.0)
        await until(lambda: is_over(updating, Phase.RUNNING))
    assert_undone(updating)
    with pytest.raises(UpdateNotFoundError):
        await updating.transfers.finish(begun.update_id, None, 60.0)


async def test_an_update_that_timed_out_and_cannot_be_undone_is_tainted(updating: Rig) -> None:
    """And the daemon lives on: a push may heal it."""
    updating.engine.fails["prepare_weights"] = GenserveError("no")
    with advanced_clock() as clock:
        await updating.transfers.start(UpdateOptions(ttl_s=60.0))
        await updating.transfers.update("", HALF, 60.0)
        await clock.advance(61.0)
        await until(lambda: is_over(updating, Phase.TAINTED))
    await updating.push(header())
    assert updating.board.phase is Phase.RUNNING


def is_over(rig: Rig, phase: Phase) -> bool:
    """Whether the update has left the engine in this phase."""
    return rig.board.phase is phase and rig.engine.running == (phase is Phase.RUNNING)


async def test_a_call_is_carried_through_when_its_caller_has_gone(updating: Rig) -> None:
    """A worker that receives cannot be interrupted; the update stays open for its time to live."""
    gate = updating.engine.gates["transfer_update"] = Gate()
    await updating.transfers.start(UpdateOptions())
    receiving = asyncio.create_task(updating.transfers.update("", HALF, 60.0))
    await gate.reached.wait()
    receiving.cancel()
    gate.open.set()
    await asyncio.wait({receiving})
    assert receiving.cancelled()
    assert await finish(updating) == 1
    assert updating.engine.live["a"] == NEW


async def test_pushes_are_refused_while_an_update_is_open(updating: Rig) -> None:
    """New ones, staged ones, and those that would go on; what is staged stays so. Other updates are refused, too."""
    await updating.push(header("staged", 2, action=PushAction.STAGE))
    await updating.stage_part(header("part", 3), 0, 7)
    begun = await updating.transfers.start(UpdateOptions(update_id="u1"))
    assert await updating.transfers.start(UpdateOptions(update_id="u1")) is begun
    for call in (
        updating.push(header("new", 4)),
        updating.push(header("part", 3)),
        updating.registry.commit("staged", header().apply),
        updating.transfers.start(UpdateOptions(update_id="u2")),
        updating.transfers.init("{}", 60.0),
    ):
        with pytest.raises(ApplyInProgressError) as caught:
            await call
        assert caught.value.metadata == {"update_id": "u1"}
    assert await finish(updating) == 1
    await updating.registry.commit("staged", header().apply)
    assert updating.engine.live == tensors(2)


@pytest.mark.parametrize("step", ["prepare_weights", "commit_weights"])
async def test_an_update_is_refused_while_a_push_is_applied(updating: Rig, step: str) -> None:
    """It is told which."""
    gate = updating.engine.gates[step] = Gate()
    pushing = asyncio.create_task(updating.push(header()))
    await gate.reached.wait()
    for call in (updating.transfers.start(UpdateOptions()), updating.transfers.init("{}", 60.0)):
        with pytest.raises(ApplyInProgressError) as caught:
            await call
        assert caught.value.metadata == {"push_id": "p1"}
    gate.open.set()
    await pushing
    await updating.transfers.start(UpdateOptions())
    assert await finish(updating) == 2


async def test_a_finished_update_answers_a_repeat_and_leaves_no_bytes(updating: Rig) -> None:
    """The store says why; the next whole push fills it again."""
    begun = await updating.transfers.start(UpdateOptions())
    await updating.transfers.update("", HALF, 60.0)
    applied = await updating.transfers.finish(begun.update_id, None, 60.0)
    assert await updating.transfers.finish(begun.update_id, None, 60.0) is applied
    with refuses(NotResidentError, says="vLLM's own weight transfer"):
        updating.resident.require()
    await updating.push(header(weight_version=2))
    assert updating.resident.require().weight_version == 2


async def test_a_version_that_cannot_be_leaves_the_update_open(updating: Rig) -> None:
    """As for a push; `force` allows an old one."""
    await updating.push(header(weight_version=3))
    await updating.transfers.start(UpdateOptions())
    for version, error in ((3, VersionNotNewerError), (0, InvalidFieldError), (1 << 32, InvalidFieldError)):
        with pytest.raises(error):
            await finish(updating, version)
    assert updating.board.phase is Phase.APPLYING
    assert await finish(updating, 2, force=True) == 2


async def test_an_update_under_a_lease_leaves_the_engine_paused(updating: Rig) -> None:
    """And a lease that is lost refuses it."""
    with pytest.raises(PauseLeaseLostError):
        await updating.transfers.start(UpdateOptions(pause_lease_id="never was"))
    grant = await updating.pauses.pause(PauseMode.KEEP, KvPolicy.REUSE, holder="t", ttl_s=60.0, timeout_s=60.0)
    await updating.transfers.start(UpdateOptions(pause_lease_id=grant.lease_id))
    await updating.transfers.update("", HALF, 60.0)
    applied = await updating.transfers.finish("", None, 60.0)
    assert (applied.paused_s, updating.board.phase) == (None, Phase.PAUSED)
    await updating.pauses.resume(grant.lease_id)
    assert updating.engine.running


async def test_a_pause_that_fails_begins_nothing(updating: Rig) -> None:
    """Pushes are let in again."""
    updating.engine.fails["pause"] = DeadlineError("late")
    with pytest.raises(DeadlineError):
        await updating.transfers.start(UpdateOptions())
    assert_undone(updating)
    await updating.push(header())


async def test_a_resume_waits_for_an_update(updating: Rig) -> None:
    """Not even `force` runs an engine whose layers are taken apart."""
    await updating.transfers.start(UpdateOptions())
    resuming = asyncio.create_task(updating.pauses.resume("", force=True))
    await turns()
    assert not resuming.done()
    await finish(updating)
    await resuming


async def test_an_init_that_fails_changes_nothing(updating: Rig) -> None:
    """vLLM's words come as PUSH_ROLLED_BACK; a late one, and one of a dead engine, as it is."""
    for failure, raised in (
        (GenserveError("no"), PushRolledBackError),
        (DeadlineError("late"), DeadlineError),
        (EngineDeadError("gone"), EngineDeadError),
    ):
        updating.engine.fails["transfer_init"] = failure
        with refuses(raised, says=str(failure)):
            await updating.transfers.init("{}", 60.0)
    await updating.push(header())


async def test_a_sleeping_engine_is_not_updated(updating: Rig) -> None:
    """vLLM would crash."""
    await updating.sleeps.sleep(PauseMode.KEEP, SleepDepth(), 60.0)
    with pytest.raises(EngineSleepingError):
        await updating.transfers.start(UpdateOptions())
    await updating.sleeps.wake_up()


async def test_a_repeated_start_begins_nothing_and_keeps_the_update_alive(updating: Rig) -> None:
    """A trainer whose answer was lost goes on with the update that it has."""
    with advanced_clock() as clock:
        begun = await updating.transfers.start(UpdateOptions(update_id="u", ttl_s=300.0, timeout_s=290.0))
        due_s, calls = begun.due_s, list(updating.engine.calls)
        await clock.advance(10.0)
        assert await updating.transfers.start(UpdateOptions(update_id="u", ttl_s=300.0)) is begun
    assert begun.due_s >= due_s + 10.0
    assert updating.engine.calls == calls
    await finish(updating)
