"""Which pause drops the keys and values of running requests: once they are gone, no later one does before they run."""

import asyncio

import pytest

from genserve.control.asleep import SleepDepth
from genserve.control.pause import Hold
from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import GenserveError
from tests.support.patience import turns
from tests.unit.control.conftest import Rig

pytestmark = pytest.mark.usefixtures("leaping_clock")

REUSE, RECOMPUTE = KvPolicy.REUSE, KvPolicy.RECOMPUTE
KV_CACHE = SleepDepth.of(None, ["kv_cache"])


async def held(rig: Rig, kv_policy: KvPolicy) -> Hold:
    """What a hold of this policy did."""
    async with rig.pauses.hold(PauseMode.KEEP, kv_policy, timeout_s=60.0) as hold:
        assert hold.interruption is None
    return hold


@pytest.mark.parametrize(("before", "count"), [(REUSE, 7), (RECOMPUTE, 0)])
async def test_a_push_into_a_pause_drops_what_the_pause_has_kept(rig: Rig, before: KvPolicy, count: int) -> None:
    """And a second push nothing, until the engine has run."""
    grant = await rig.pauses.pause(PauseMode.KEEP, before, holder="t", ttl_s=None, timeout_s=60.0)
    assert (await held(rig, REUSE)).recomputed_tokens == 0
    assert (await held(rig, RECOMPUTE)).recomputed_tokens == count
    assert (await held(rig, RECOMPUTE)).recomputed_tokens == 0
    await rig.pauses.resume(grant.lease_id)
    assert (await held(rig, RECOMPUTE)).recomputed_tokens == 7


async def test_a_pause_that_failed_has_dropped_nothing(rig: Rig) -> None:
    """The engine runs again."""
    rig.engine.fails["pause"] = GenserveError("no")
    with pytest.raises(GenserveError):
        await held(rig, RECOMPUTE)
    assert (await held(rig, RECOMPUTE)).drops


async def test_a_sleep_has_dropped_them_until_the_engine_runs(rig: Rig) -> None:
    """A push into an engine that sleeps drops nothing, and the engine runs when it is awake."""
    await rig.sleeps.sleep(PauseMode.KEEP, KV_CACHE, 60.0)
    assert not (await held(rig, RECOMPUTE)).drops
    await rig.sleeps.wake_up()
    assert (await held(rig, RECOMPUTE)).drops


async def test_an_engine_that_woke_up_and_is_still_paused_has_none(rig: Rig) -> None:
    """Until its lease ends."""
    grant = await rig.pauses.pause(PauseMode.KEEP, REUSE, holder="t", ttl_s=None, timeout_s=60.0)
    await rig.sleeps.sleep(PauseMode.KEEP, KV_CACHE, 60.0)
    await rig.sleeps.wake_up()
    assert not (await held(rig, RECOMPUTE)).drops
    await rig.pauses.resume(grant.lease_id)
    assert (await held(rig, RECOMPUTE)).drops


async def test_a_block_that_fails_interrupts_nothing_worth_telling(rig: Rig) -> None:
    """No push is told of."""
    with pytest.raises(RuntimeError):
        async with rig.pauses.hold(PauseMode.KEEP, RECOMPUTE, timeout_s=60.0) as hold:
            raise RuntimeError
    assert hold.interruption is None and hold.recomputed_tokens is None


async def test_push_that_leaves_the_engine_paused_waits_briefly_for_front_ends(rig: Rig) -> None:
    """Nobody generates meanwhile. One that does not tell in time does not hold the trainer up for longer."""
    rig.engine.interruption.telling.clear()
    grant = await rig.pauses.pause(PauseMode.KEEP, REUSE, holder="t", ttl_s=None, timeout_s=60.0)
    holding = asyncio.create_task(held(rig, RECOMPUTE))
    await turns()
    assert not holding.done()
    rig.engine.interruption.telling.set()
    assert (await holding).recomputed_tokens == 7
    await rig.pauses.resume(grant.lease_id)
    rig.engine.interruption.telling.clear()
    await rig.pauses.pause(PauseMode.KEEP, REUSE, holder="t", ttl_s=None, timeout_s=60.0)
    assert (await held(rig, RECOMPUTE)).recomputed_tokens is None


async def test_the_tokens_are_unknown_until_every_client_has_told_them(rig: Rig) -> None:
    """Not 0."""
    rig.engine.interruption.telling.clear()
    hold = await held(rig, RECOMPUTE)
    assert hold.recomputed_tokens is None
    rig.engine.interruption.telling.set()
    assert hold.recomputed_tokens == 7
