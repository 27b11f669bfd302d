"""When a lease is renewed, and what is said of one that was lost."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from genserve.client.control import held_pause
from genserve.client.state import EngineState, PauseLease, PauseResult, ResumeResult
from genserve.errors import DeadlineError, GenserveError, PauseLeaseLostError, UnavailableError
from genserve.wire.literals import KvPolicy, PauseMode
from tests.support.clocks import leaping_clock
from tests.support.refusals import refuses

STATE = EngineState("instance", 1, "paused", [], 0, 0)
LEASE = PauseLease("l", "me", "keep", None, "")
TTL_S = 30.0


@pytest.fixture(autouse=True)
async def only_order_counts() -> AsyncIterator[None]:
    """Timers fire when they are due and nothing else is to be done, however late the machine is."""
    with leaping_clock():
        yield


@dataclass
class Calls:
    """The calls of a lease; `fails` is raised by each renewal, `lost` by the end."""

    fails: list[GenserveError] = field(default_factory=list)
    lost: GenserveError | None = None
    expired: bool = False
    renewals: list[tuple[str, float, float]] = field(default_factory=list)
    renewed_s: asyncio.Queue[float] = field(default_factory=asyncio.Queue)
    ended: list[str] = field(default_factory=list)

    async def pause(
        self, mode: PauseMode | None, kv_policy: KvPolicy | None, *, holder: str, ttl_s: float, timeout_s: float
    ) -> PauseResult:
        assert (mode, kv_policy, holder, ttl_s, timeout_s) == ("wait", "reuse", "me", TTL_S, 7.0)
        return PauseResult(LEASE, 0, 0, STATE)

    async def renew_pause(self, lease_id: str, *, ttl_s: float, timeout_s: float) -> PauseLease:
        self.renewals.append((lease_id, ttl_s, timeout_s))
        self.renewed_s.put_nowait(asyncio.get_running_loop().time())
        if self.fails:
            raise self.fails.pop(0)
        return LEASE

    async def resume(self, lease_id: str) -> ResumeResult:
        self.ended.append(lease_id)
        if self.lost is not None:
            raise self.lost
        return ResumeResult(self.expired, STATE)


def held(calls: Calls):  # type: ignore[no-untyped-def]
    """A block under the lease."""
    return held_pause(calls, "wait", "reuse", holder="me", ttl_s=TTL_S, timeout_s=7.0)


async def test_a_lease_is_renewed_before_half_of_its_time_is_over() -> None:
    """So that a failure leaves time for a second try."""
    calls = Calls()
    async with held(calls) as lease, asyncio.timeout(TTL_S / 2):
        await calls.renewed_s.get()
        assert calls.renewals == [("l", TTL_S, TTL_S / 3)]
        assert not lease.is_lost
    assert calls.ended == ["l"]


@pytest.mark.parametrize("failure", [UnavailableError("away"), DeadlineError("slow")])
async def test_one_renewal_that_fails_is_tried_again(failure: GenserveError) -> None:
    """A daemon that was busy for a moment."""
    calls = Calls(fails=[failure])
    began_s = asyncio.get_running_loop().time()
    async with held(calls) as lease, asyncio.timeout(2 * TTL_S):
        after_s = [await calls.renewed_s.get() - began_s for _ in range(3)]
        assert after_s == pytest.approx([TTL_S / 3, 2 * TTL_S / 3, TTL_S])
        assert not lease.is_lost
    assert calls.ended == ["l"]


async def lose(calls: Calls) -> None:
    """Stays in the block until the lease is lost."""
    async with held(calls) as lease, asyncio.timeout(2 * TTL_S):
        while not lease.is_lost:
            await asyncio.sleep(1.0)


async def test_a_lease_that_is_not_renewed_in_its_time_is_lost() -> None:
    """And not earlier. The block is told at its end, whatever the end says."""
    calls = Calls(fails=[UnavailableError("away")] * 100, lost=UnavailableError("away"))
    began_s = asyncio.get_running_loop().time()
    with refuses(PauseLeaseLostError) as caught:
        await lose(calls)
    assert asyncio.get_running_loop().time() - began_s >= TTL_S
    assert isinstance(caught.value.__cause__, UnavailableError)


async def test_an_error_that_no_time_heals_loses_the_lease_at_once() -> None:
    """Somebody has taken it away."""
    gone = PauseLeaseLostError("gone")
    calls = Calls(fails=[gone])
    with pytest.raises(PauseLeaseLostError) as caught:
        await lose(calls)
    assert caught.value is gone
    assert len(calls.renewals) == 1


async def test_a_lease_that_had_ended_is_told_at_the_end() -> None:
    """The engine may have run inside the block."""
    with refuses(PauseLeaseLostError):
        async with held(Calls(expired=True)):
            pass


async def test_a_pause_that_cannot_be_ended_is_noted_on_what_went_wrong() -> None:
    """The block's own error comes first; a lost lease is worse, and a cancellation stays one."""
    with pytest.raises(KeyError) as caught:
        async with held(Calls(lost=UnavailableError("away"))):
            raise KeyError
    (note,) = caught.value.__notes__
    assert "away" in note and "lease l " in note
    with pytest.raises(PauseLeaseLostError) as lost:
        async with held(Calls(lost=PauseLeaseLostError("gone"))):
            raise KeyError
    assert isinstance(lost.value.__cause__, KeyError)
    with pytest.raises(asyncio.CancelledError) as cancelled:
        async with held(Calls(lost=UnavailableError("away"))):
            raise asyncio.CancelledError
    (note,) = cancelled.value.__notes__
    assert "away" in note
    with pytest.raises(UnavailableError):
        async with held(Calls(lost=UnavailableError("away"))):
            pass
