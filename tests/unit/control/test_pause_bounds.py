"""What a pause may leave behind for everybody to see, and what is told of how long it took."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from genserve.control.leases import PauseLease
from genserve.control.pause import Hold, Standstill
from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import InvalidFieldError, QueueFullError
from genserve.rpc.convert.values import to_state
from tests.support.clocks import advanced_clock
from tests.support.kept import kept
from tests.support.patience import STEP_S, turns
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.control.conftest import Rig


@pytest.mark.parametrize("field", ["holder", "request_id"])
@pytest.mark.parametrize("text", ["x" * 257, "a\nb", "\x00"])
async def test_what_everybody_is_shown_of_a_lease_is_short_and_printable(rig: Rig, field: str, text: str) -> None:
    """It rides in every answer to everybody."""
    with refuses(InvalidFieldError, field=field):
        await rig.pause(**{field: text})
    assert rig.engine.calls == []
    await rig.pause(**{field: "ä" * 256})


async def test_leases_are_bounded(rig: Rig) -> None:
    """One more is QUEUE_FULL before the engine is touched; a repeat is answered, and one given back makes room."""
    grants = [await rig.pause(request_id=f"r{number}", holder="\N{SNOWMAN}" * 256) for number in range(256)]
    calls = list(rig.engine.calls)
    with pytest.raises(QueueFullError) as full:
        await rig.pause(PauseMode.ABORT)
    assert full.value.retry_after_s == 1.0
    assert rig.engine.calls == calls
    assert await rig.pause(request_id="r7") == grants[7]
    assert to_state(rig.board.state()).ByteSize() < 1 << 20
    await rig.pauses.resume(grants[0].lease_id)
    await rig.pause()


async def test_nothing_is_kept_of_leases_that_have_ended(rig: Rig) -> None:
    """A trainer that pauses every step for weeks does not fill the memory: what a repeat would be answered goes with
    the lease."""
    for number in range(3):
        grant = await rig.pause(request_id=f"r{number}")
        assert len(kept(rig.pauses, PauseLease)) == 1
        await rig.pauses.resume(grant.lease_id)


async def test_watcher_hears_of_every_lease(rig: Rig) -> None:
    """Beside another one, which keeps the engine paused: that it was granted, renewed or given back."""
    await rig.pause()

    async def told(change: Callable[[], Any]) -> Any:
        watching = asyncio.create_task(rig.board.wait_change())
        await turns()
        result = change()
        result = await result if inspect.isawaitable(result) else result
        await asyncio.wait_for(watching, STEP_S)
        return result

    grant = await told(rig.pause)
    lease = await told(lambda: rig.pauses.renew(grant.lease_id, 30.0))
    assert (lease.lease_id, lease.ttl_s) == (grant.lease_id, 30.0)
    assert await told(lambda: rig.pauses.resume(grant.lease_id)) is False


async def test_the_time_that_resuming_takes_is_reported(rig: Rig) -> None:
    """It is a part of the time that generation stood still."""
    gate = rig.engine.gates["resume"] = Gate()

    async def push() -> Hold:
        async with rig.pauses.hold(PauseMode.KEEP, KvPolicy.REUSE, timeout_s=60.0) as hold:
            assert hold.resume_s == 0.0
        return hold

    with advanced_clock() as clock:
        began_s = clock.now_s()
        pushing = asyncio.create_task(push())
        await gate.reached.wait()
        await clock.advance(20.0)
        gate.open.set()
        hold = await pushing
        assert hold.paused_s is not None
        assert 20.0 <= hold.resume_s <= hold.paused_s <= clock.now_s() - began_s


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_while_a_pause_waits_for_requests_generation_does_not_stand_still(rig: Rig, mode: PauseMode) -> None:
    """With WAIT they run until the pause has taken hold. The other modes stop them at once."""
    gate = rig.engine.gates["pause"] = Gate()

    async def push() -> Hold:
        async with rig.pauses.hold(mode, KvPolicy.REUSE, timeout_s=60.0) as hold:
            return hold

    with advanced_clock() as clock:
        began_s = clock.now_s()
        pushing = asyncio.create_task(push())
        await gate.reached.wait()
        await clock.advance(2000.0)
        gate.open.set()
        hold = await pushing
        elapsed_s = clock.now_s() - began_s
    assert hold.paused_s is not None
    assert hold.pause_s >= 2000.0
    if mode is PauseMode.WAIT:
        assert 0.0 <= hold.paused_s <= elapsed_s - hold.pause_s
    else:
        assert hold.pause_s <= hold.paused_s <= elapsed_s


def test_a_pause_is_as_long_as_from_its_begin_to_its_end() -> None:
    """What is said again changes nothing."""
    now = 10.0
    standstill = Standstill(lambda: now)
    assert (standstill.is_on, standstill.seconds) == (False, 0.0)
    standstill.set(on=False)
    standstill.set(on=True)
    now = 11.0
    standstill.set(on=True)
    now = 12.0
    assert (standstill.is_on, standstill.seconds) == (True, 2.0)
    assert sum(standstill.lengths.counts) == 0
    standstill.set(on=False)
    standstill.set(on=False)
    assert (standstill.is_on, standstill.seconds) == (False, 0.0)
    assert (sum(standstill.lengths.counts), standstill.lengths.sum) == (1, 2.0)


async def test_leases_that_overlap_are_one_pause_and_a_push_is_another(rig: Rig) -> None:
    """What counts is when nothing is scheduled, not who asked for it."""
    first, second = await rig.pause(), await rig.pause()
    await rig.pauses.resume(first.lease_id)
    assert rig.pauses.standstill.is_on
    await rig.pauses.resume(second.lease_id)
    assert sum(rig.pauses.standstill.lengths.counts) == 1
    async with rig.pauses.hold(PauseMode.KEEP, KvPolicy.REUSE, timeout_s=30.0):
        assert rig.pauses.standstill.is_on
    assert sum(rig.pauses.standstill.lengths.counts) == 2
