"""How long generation stood still."""

from genserve.control.standstill import Standstill
from genserve.engine.types import KvPolicy, PauseMode
from tests.unit.control.conftest import Rig


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
    await rig.pauses.resume(first.lease.lease_id)
    assert rig.pauses.standstill.is_on
    await rig.pauses.resume(second.lease.lease_id)
    assert sum(rig.pauses.standstill.lengths.counts) == 1
    async with rig.pauses.hold(PauseMode.KEEP, KvPolicy.REUSE, timeout_s=30.0):
        assert rig.pauses.standstill.is_on
    assert sum(rig.pauses.standstill.lengths.counts) == 2
