"""A push that was to be applied at once and is refused at its end: only what was sent to wait for a commit is kept."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from genserve.control.asleep import SleepDepth
from genserve.engine.types import PauseMode
from genserve.errors import ApplyInProgressError, EngineSleepingError, VersionNotNewerError
from genserve.weights.push.types import ApplyOptions, PushAction, PushState
from tests.unit.weights.conftest import MANIFEST, Rig, header, open_rig, send, tensors, weights

SIZE_BYTES = MANIFEST.total_bytes


async def loses_a_race(rig: Rig) -> None:
    """A newer version, which was staged, is committed before the last byte of p1 is there."""
    await rig.push(header("newer", 2, action=PushAction.STAGE))
    stream = await rig.registry.open(header(attempt="a"))
    send(stream, weights(1))
    await rig.registry.commit("newer", ApplyOptions())
    with pytest.raises(VersionNotNewerError):
        await stream.finish()
    stream.detach()


async def meets_a_sleep(rig: Rig) -> None:
    """It falls asleep before the last byte of p1 is there, and is awake again."""
    stream = await rig.registry.open(header(attempt="a"))
    send(stream, weights(1))
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(1, ()), 60.0)
    with pytest.raises(EngineSleepingError):
        await stream.finish()
    stream.detach()
    await rig.sleeps.wake_up()


@pytest.mark.parametrize(("refuses", "room_for"), [(loses_a_race, 3), (meets_a_sleep, 2)])
async def test_a_push_that_is_refused_at_its_end_gives_way_to_the_next_one(
    tmp_path: Path, refuses: Callable[[Rig], Awaitable[None]], room_for: int
) -> None:
    """In a daemon that has room for the served version and the next one. Until then it says why it was refused."""
    async with open_rig(tmp_path, max_staging_bytes=room_for * SIZE_BYTES - 1) as rig:
        await refuses(rig)
        told = rig.registry.report("p1").push
        assert told.state is PushState.FAILED and told.issues
        await rig.push(header("p3", 3))
        assert rig.engine.live == tensors(3)
        assert list(rig.registry.live) == []


async def test_a_refused_push_gives_way_also_after_a_repeat_that_broke_off(tmp_path: Path) -> None:
    """Its bytes were checked once, which is no reason to keep them."""
    async with open_rig(tmp_path, max_staging_bytes=2 * SIZE_BYTES - 1) as rig:
        await meets_a_sleep(rig)
        (await rig.registry.open(header(attempt="a"))).detach()
        await rig.push(header("p3", 3))
        assert rig.engine.live == tensors(3)


async def test_a_push_that_met_a_sleep_is_repeated_without_its_bytes(rig: Rig) -> None:
    """By the same attempt, as any push that has failed."""
    await meets_a_sleep(rig)
    await rig.push(header(attempt="a"), b"")
    assert rig.engine.live == tensors(1)


async def test_staged_push_stays_staged_when_its_commit_is_refused_at_its_end(rig: Rig) -> None:
    """Of two commits that begin together one finds the other at work."""
    for version in (1, 2):
        await rig.push(header(f"p{version}", version, action=PushAction.STAGE))
    commits = (rig.registry.commit(push_id, ApplyOptions()) for push_id in ("p1", "p2"))
    first, second = await asyncio.gather(*commits, return_exceptions=True)
    assert not isinstance(first, BaseException) and isinstance(second, ApplyInProgressError)
    assert rig.registry.report("p2").push.state is PushState.STAGED


async def test_staged_push_is_kept_when_its_resend_to_apply_is_refused(rig: Rig) -> None:
    """Who has staged it means to commit it: another trainer may be told no."""
    await rig.push(header("p1", 1, action=PushAction.STAGE))
    await rig.push(header("p2", 2))
    with pytest.raises(VersionNotNewerError):
        await rig.push(header("p1", 1))
    assert rig.registry.report("p1").push.state is PushState.STAGED
