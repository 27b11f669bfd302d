"""The registry's rules: who may open a push, what a retry finds, and what is kept for how long."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from genserve.control.conditions import Phase
from genserve.errors import (
    ApplyInProgressError,
    DrainingError,
    EngineDeadError,
    EngineSleepingError,
    GenserveError,
    InvalidFieldError,
    ManifestMismatchError,
    PushConflictError,
    PushNotFoundError,
    PushRolledBackError,
    PushTruncatedError,
    StagingFullError,
    VersionNotNewerError,
    WeightVersionMismatchError,
)
from genserve.tensors.manifest import Manifest
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from genserve.weights.push.types import ApplyOptions, PushAction, PushState
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, turns, until
from tests.support.phases import enter_phase
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import (
    CHECKPOINT,
    MANIFEST,
    Rig,
    after,
    further,
    header,
    num_arenas,
    send,
    tensors,
    weights,
)

OTHER_MANIFEST = CheckpointIndex(
    dict(CHECKPOINT.tensors) | {"a": CheckpointTensor("F16", (4,), 8)}  # a good one, of another layout
).as_manifest()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"weight_version": 0}, "header.weight_version"),
        ({"weight_version": 1 << 32}, "header.weight_version"),
        ({"push_id": "x" * 257}, "header.push_id"),
        ({"staging_ttl_s": 0.0}, "header.staging_ttl"),
        ({"staging_ttl_s": float("nan")}, "header.staging_ttl"),
        ({"num_streams": 0}, "header.num_streams"),
        ({"manifest": None}, "header.manifest"),
        ({"manifest": None, "manifest_digest": "abc"}, "header.manifest_digest"),
        ({"manifest": None, "manifest_digest": "0" * 64, "push_id": ""}, "header.push_id"),
    ],
)
async def test_field_that_cannot_be_is_refused_by_path(rig: Rig, fields: dict[str, Any], path: str) -> None:
    """A client finds the field without parsing a message."""
    with pytest.raises(InvalidFieldError) as error:
        await rig.registry.open(header(**fields))
    assert [violation.field for violation in error.value.violations] == [path]


async def test_manifest_that_does_not_fit_names_each_tensor(rig: Rig) -> None:
    """One violation a tensor, and nothing is allocated."""
    wrong = CheckpointIndex({"a": CheckpointTensor("F32", (5,), 20), "c": CheckpointTensor("F32", (4,), 16)})
    before = num_arenas()
    with pytest.raises(ManifestMismatchError) as error:
        await rig.registry.open(header(manifest=wrong.as_manifest()))
    fields = {violation.field for violation in error.value.violations}
    assert fields == {f'header.manifest.tensors["{name}"]' for name in "abc"}
    assert num_arenas() == before
    with pytest.raises(PushNotFoundError):
        rig.registry.report("p1")


@pytest.mark.parametrize(
    ("phase", "error"),
    [(Phase.DRAINING, DrainingError), (Phase.DEAD, EngineDeadError), (Phase.SLEEPING, EngineSleepingError)],
)
async def test_push_is_refused_by_phase(rig: Rig, phase: Phase, error: type[GenserveError]) -> None:
    """At the header, and without a call of the engine."""
    enter_phase(rig.board, phase)
    with pytest.raises(error):
        await rig.registry.open(header())
    assert rig.engine.calls == []


@pytest.mark.parametrize("version", [1, 2])
async def test_version_that_is_not_newer_needs_force(rig: Rig, version: int) -> None:
    """Equal or older than the one served: refused, unless the trainer says that it means it."""
    await rig.push(header("first", 2))
    with pytest.raises(VersionNotNewerError):
        await rig.registry.open(header("second", version))
    await rig.push(header("second", version, force=True))
    assert rig.engine.live == tensors(version)


async def test_expected_version_is_compared(rig: Rig) -> None:
    """Compare and swap; 0 is a version (that before the first push), not the absence of one."""
    await rig.push(header("first", 1, expected_version=0))
    with pytest.raises(WeightVersionMismatchError):
        await rig.registry.open(header("second", 2, expected_version=0))
    await rig.push(header("second", 2, expected_version=1))


async def test_push_id_is_minted_when_empty(rig: Rig) -> None:
    """Each empty id is a push of its own."""
    first = await rig.push(header("", 1))
    second = await rig.push(header("", 2))
    assert len({first.push.push_id, second.push.push_id, ""}) == 3


async def test_validate_takes_no_memory_and_no_bytes(rig: Rig) -> None:
    """A dry run: VALID, and as if nothing had been."""
    before = num_arenas()
    stream = await rig.registry.open(header(action=PushAction.VALIDATE))
    with pytest.raises(InvalidFieldError):
        stream.write(0, b"x", None)
    outcome = await stream.finish()
    stream.detach()
    assert (outcome.push.state, outcome.applied) == (PushState.VALID, None)
    assert (outcome.push.manifest_digest, outcome.push.total_bytes) == (MANIFEST.digest, MANIFEST.total_bytes)
    assert num_arenas() == before
    assert rig.engine.calls == []


async def test_retry_of_an_applied_push_answers_the_same_and_applies_nothing(rig: Rig) -> None:
    """The answer was lost: the trainer pushes again with the same id, even while the daemon drains."""
    outcome = await rig.push(header())
    calls = list(rig.engine.calls)
    enter_phase(rig.board, Phase.DRAINING)
    assert await rig.push(header()) == outcome
    known = rig.registry.report("p1")
    assert known.applied is not None
    assert replace(known, applied=replace(known.applied, longest_wait_s=None, discard_s=None)) == outcome
    assert rig.engine.calls == calls


@pytest.mark.parametrize("other", [{"weight_version": 2}, {"manifest": OTHER_MANIFEST}])
@pytest.mark.parametrize("applied", [True, False])
async def test_push_id_of_another_push_is_a_conflict(rig: Rig, other: dict[str, Any], applied: bool) -> None:
    """Same id, other manifest or version: whether the first is applied or still arriving."""
    if applied:
        await rig.push(header())
    else:
        await rig.stage_part(header(), 0, 10)
    with pytest.raises(PushConflictError):
        await rig.registry.open(header(**other))


async def test_only_the_last_outcomes_are_remembered(rig: Rig) -> None:
    """A trainer that pushes for weeks does not fill the memory: the 65th push is the end of the first."""
    for version in range(1, 66):
        await rig.push(header(f"p{version}", version))
    assert rig.registry.report("p2").push.state is PushState.APPLIED
    with pytest.raises(PushNotFoundError):
        rig.registry.report("p1")


async def test_second_push_is_refused_while_the_first_arrives(rig: Rig) -> None:
    """At once, and the error names the one that is under way."""
    first = await rig.registry.open(header("first"))
    with pytest.raises(ApplyInProgressError) as error:
        await rig.registry.open(header("second", 2))
    assert error.value.metadata == {"push_id": "first"}
    first.detach()
    await rig.push(header("second", 2))


async def test_second_push_is_refused_while_the_first_is_applied(rig: Rig) -> None:
    """Also when the client of the first has gone."""
    gate = rig.engine.gates["prepare_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(header("first")))
    await gate.reached.wait()
    pushing.cancel()
    await asyncio.wait({pushing})
    with pytest.raises(ApplyInProgressError):
        await rig.registry.open(header("second", 2))
    gate.open.set()


@pytest.mark.parametrize("step", ["prepare_weights", "pause", "commit_weights", "resume"])
async def test_client_that_goes_away_during_the_apply_changes_nothing_about_it(rig: Rig, step: str) -> None:
    """Cancelled at any step, the push is carried through; a retry with the same id gets its outcome."""
    gate = rig.engine.gates[step] = Gate()
    pushing = asyncio.create_task(rig.push(header()))
    await gate.reached.wait()
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    retrying = asyncio.create_task(rig.push(header()))
    await until(lambda: rig.registry.live["p1"].num_attached == 1)
    await turns()
    assert not retrying.done()
    gate.open.set()
    outcome = await retrying
    assert outcome.push.state is PushState.APPLIED
    assert rig.engine.live == tensors(1)
    assert rig.engine.running
    assert rig.engine.calls.count("commit_weights 1") == 1


async def test_abandoned_push_makes_room_for_another(rig: Rig) -> None:
    """A trainer that was killed and started anew is not locked out by its own leftovers until their time to live."""
    before = num_arenas()
    await rig.stage_part(header("dead"), 0, 10)
    stream = await rig.registry.open(header("new", 2))
    assert num_arenas() == before + 1
    with pytest.raises(PushNotFoundError):
        rig.registry.report("dead")
    stream.detach()


async def test_staged_pushes_count_against_the_quota(rig: Rig) -> None:
    """100 bytes hold three pushes of 32; a fourth is refused at its header, until one is discarded."""
    for version in (1, 2, 3):
        outcome = await rig.push(header(f"p{version}", version, action=PushAction.STAGE))
        assert outcome.push.state is PushState.STAGED
    with pytest.raises(StagingFullError):
        await rig.registry.open(header("p4", 4))
    rig.registry.discard("p2")
    await rig.push(header("p4", 4))
    assert rig.engine.live == tensors(4)


async def test_staged_push_is_applied_by_a_commit_or_by_pushing_it_again(rig: Rig) -> None:
    """Its attempt need not send its bytes twice; another one has to, and may not bring other ones."""
    await rig.push(header("p1", 1, action=PushAction.STAGE))
    assert rig.engine.calls == []
    assert (await rig.registry.commit("p1", ApplyOptions())).push.state is PushState.APPLIED
    assert rig.engine.live == tensors(1)
    await rig.push(header("p2", 2, action=PushAction.STAGE, attempt="a"))
    with pytest.raises(PushTruncatedError):
        await rig.push(header("p2", 2), b"")
    assert rig.registry.report("p2").push.state is PushState.STAGED
    await rig.push(header("p2", 2), weights(2))
    assert rig.engine.live == tensors(2)
    await rig.push(header("p3", 3, action=PushAction.STAGE, attempt="a"))
    await rig.push(header("p3", 3, attempt="a"), b"")
    assert rig.engine.live == tensors(3)


async def test_staged_push_that_was_overtaken_is_refused(rig: Rig) -> None:
    """The version is compared again when it is applied."""
    await rig.push(header("old", 1, action=PushAction.STAGE))
    await rig.push(header("new", 2))
    with pytest.raises(VersionNotNewerError):
        await rig.registry.commit("old", ApplyOptions())
    assert rig.engine.live == tensors(2)


async def test_commit_of_an_incomplete_push_is_a_truncation(rig: Rig) -> None:
    """And it stays staged for a resume."""
    await rig.stage_part(header(attempt="a"), 0, 10)
    with pytest.raises(PushTruncatedError):
        await rig.registry.commit("p1", ApplyOptions())
    assert rig.registry.report("p1").push.received_bytes == 10


async def test_failed_push_can_be_retried_without_its_bytes(rig: Rig) -> None:
    """The same attempt takes it up again: what was staged is still there."""
    rig.engine.fails["prepare_weights"] = PushRolledBackError("out of memory")
    with pytest.raises(PushRolledBackError):
        await rig.push(header(attempt="a"))
    assert rig.registry.report("p1").push.state is PushState.FAILED
    stream = await rig.registry.open(header(attempt="a"))
    assert rig.registry.report("p1").push.missing == ()
    assert (await stream.finish()).push.state is PushState.APPLIED


async def test_staged_bytes_are_freed_after_their_time_to_live(rig: Rig) -> None:
    """Incomplete or complete: a killed trainer leaves nothing for longer than that."""
    before = num_arenas()
    await rig.push(header("whole", 1, action=PushAction.STAGE, staging_ttl_s=600.0))
    await rig.stage_part(header("part", 2, staging_ttl_s=600.0), 0, 10)
    assert num_arenas() == before + 2
    with advanced_clock() as clock:
        await clock.advance(300.0)
        assert len(rig.registry.live) == 2
        await clock.advance(301.0)
        await until(lambda: not rig.registry.live)
    assert num_arenas() == before
    for push_id in ("whole", "part"):
        with pytest.raises(PushNotFoundError):
            rig.registry.report(push_id)


async def test_stream_that_sends_nothing_for_the_time_to_live_is_ended(rig: Rig) -> None:
    """A writer that stalls is told: it does not hold the push for ever, and others who wait for it are told too."""
    opened = header(num_streams=2, staging_ttl_s=600.0)
    stalled, waiting = await rig.registry.open(opened), await rig.registry.open(further(opened))
    with advanced_clock() as clock, pytest.raises(PushTruncatedError):
        await after(clock, 601.0, waiting.finish())
    await asyncio.wait_for(stalled.gone.wait(), STEP_S)
    with pytest.raises(PushTruncatedError):
        stalled.write(0, b"x", None)
    stalled.detach()
    waiting.detach()


async def test_applied_push_holds_the_resident_memory_alone(rig: Rig) -> None:
    """What was resident before awaits the next push from when it is replaced, not when the last stream of a push is
    forgotten."""
    await rig.push(header("p0", 1))
    before = num_arenas()
    for version in (2, 3):
        stream = await rig.registry.open(header(f"p{version}", version))
        send(stream, weights(version))
        await stream.finish()
        assert num_arenas() == before + 1
        send(stream, weights(version), 0, 7)  # a repeat is ignored
        stream.detach()
    assert rig.engine.live == tensors(3)


async def test_close_carries_an_apply_through_and_frees_the_rest(rig: Rig) -> None:
    """At a shutdown: nothing is half applied, nothing is left, nothing begins."""
    before = num_arenas()
    await rig.push(header("staged", 2, action=PushAction.STAGE))
    gate = rig.engine.gates["commit_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(header("applied", 1)))
    await gate.reached.wait()
    closing = asyncio.create_task(rig.registry.close())
    await turns()
    assert not closing.done()
    gate.open.set()
    await closing
    assert (await pushing).push.state is PushState.APPLIED
    assert num_arenas() == before + 1  # the resident one
    with pytest.raises(DrainingError):
        await rig.registry.open(header("late", 3))


async def test_hostile_count_of_tensors_is_refused_before_it_is_converted(rig: Rig) -> None:
    """As the servicer asks, with the number alone."""
    with pytest.raises(ManifestMismatchError):
        await rig.registry.open(header(manifest=Manifest(MANIFEST.tensors * 100_000, 32)))
