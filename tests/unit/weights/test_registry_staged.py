"""A staged push that another attempt took up and broke off is as it was, and a shutdown meets pushes in any state."""

import asyncio
from pathlib import Path

import pytest

from genserve.errors import (
    DrainingError,
    PauseLeaseLostError,
    PushConflictError,
    PushTruncatedError,
    VersionNotNewerError,
)
from genserve.weights.push.staging import Staging
from genserve.weights.push.types import ApplyOptions, PushAction, PushState
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, turns, until
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import Rig, header, open_rig, send, tensors, weights
from tests.unit.weights.prepared import is_preparing


async def break_off(rig: Rig, **fields: object) -> None:
    """An attempt that opens a stream and brings nothing."""
    stream = await rig.registry.open(header(**fields))  # type: ignore[arg-type]
    stream.detach()


async def test_an_attempt_without_a_byte_is_not_the_one_that_is_applied(tmp_path: Path) -> None:
    """Nobody has to prove himself who was there when the bytes came, and nobody else gets away with other ones."""
    async with open_rig(tmp_path, keeps_resident=False) as rig:
        await rig.push(header(action=PushAction.STAGE, attempt="a1"))
        await break_off(rig, attempt="a2")
        await rig.registry.commit("p1", ApplyOptions())
        with pytest.raises(PushConflictError):
            await rig.push(header(attempt="a2"), weights(9))
        assert rig.engine.live == tensors(1)


async def test_an_attempt_without_a_byte_changes_nothing_about_what_is_staged(rig: Rig) -> None:
    """Neither what its header allows nor how long it is kept."""
    await rig.push(header("old", 5, action=PushAction.STAGE, attempt="a1"))
    await rig.push(header("new", 7))
    await break_off(rig, push_id="old", weight_version=5, attempt="a2", force=True, staging_ttl_s=60.0)
    with advanced_clock() as clock:
        await clock.advance(120.0)
    with pytest.raises(VersionNotNewerError):
        await rig.registry.commit("old", ApplyOptions())
    assert rig.registry.report("old").push.state is PushState.STAGED


async def test_the_attempt_that_staged_a_push_goes_on_with_it(rig: Rig) -> None:
    """All of its bytes count, whatever another one has begun."""
    await rig.push(header(action=PushAction.STAGE, attempt="a1"))
    stream = await rig.registry.open(header(attempt="a2"))
    send(stream, weights(1), 0, 10)
    stream.detach()
    report = rig.registry.report("p1").push
    assert (report.state, report.attempt, report.missing) == (PushState.STAGED, "a1", ())
    with pytest.raises(PushTruncatedError):
        await rig.push(header(attempt="a2"), b"")
    await rig.push(header(attempt="a1"), b"")
    assert rig.engine.live == tensors(1)


async def test_a_shutdown_waits_for_what_begins_while_it_waits(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A staged push is sent again beside one that is applied: its end comes when nothing may begin any more."""
    await rig.push(header("b", 2, action=PushAction.STAGE, attempt="b"))
    gate = rig.engine.gates["commit_weights"] = Gate()
    applying = asyncio.create_task(rig.push(header("a", 1)))
    await gate.reached.wait()
    again = await rig.registry.open(header("b", 2, attempt="b"))
    closing = asyncio.create_task(rig.registry.close())
    await turns()
    ending = asyncio.create_task(again.finish())
    await turns()
    gate.open.set()
    await asyncio.wait_for(closing, STEP_S)
    assert (await applying).push.state is PushState.APPLIED
    with pytest.raises(DrainingError):
        await ending


async def test_a_commit_waits_for_a_check_and_no_longer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the check of a push that is then applied it gets that one's outcome on that one's time."""
    loop, checking, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    check = Staging.tied_issues

    def slow(staging: Staging, tied: object) -> object:
        loop.call_soon_threadsafe(checking.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(STEP_S)
        return check(staging, tied)  # type: ignore[arg-type]

    monkeypatch.setattr(Staging, "tied_issues", slow)
    gate = rig.engine.gates["prepare_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(header(apply=ApplyOptions(timeout_s=60.0))))
    await checking.wait()
    committing = asyncio.create_task(rig.registry.commit("p1", ApplyOptions()))
    await turns()
    go_on.set()
    await until(lambda: is_preparing(rig))
    with advanced_clock() as clock:
        await clock.advance(61.0)
        results = await asyncio.gather(pushing, committing, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["DeadlineError", "DeadlineError"]
    gate.open.set()


@pytest.mark.parametrize("action", [PushAction.PREPARE, PushAction.STAGE])
async def test_a_commit_under_a_lease_that_is_lost_changes_nothing(rig: Rig, action: PushAction) -> None:
    """What is prepared stays so: a replica with a wrong lease need not make the others of its fleet wait."""
    before = (await rig.push(header(action=action))).push
    with pytest.raises(PauseLeaseLostError):
        await rig.registry.commit("p1", ApplyOptions(pause_lease_id="gone"))
    assert rig.registry.report("p1").push == before
    await rig.registry.commit("p1", ApplyOptions())
    assert rig.engine.calls.count("prepare_weights") == 1
