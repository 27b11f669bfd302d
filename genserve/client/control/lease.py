"""Holds a pause: takes a lease, renews it in the background, and ends it however the block ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from genserve.client.control.state import PauseLease, PauseResult, ResumeResult
from genserve.errors import DeadlineError, GenserveError, PauseLeaseLostError, UnavailableError
from genserve.transport.errors import ClientClosedError
from genserve.wire.literals import KvPolicy, PauseMode


@dataclass(frozen=True, slots=True)
class HeldPause(PauseLease):
    """A lease that is renewed in the background until its block ends."""

    renewal: "asyncio.Task[None]" = field(repr=False, compare=False)

    @property
    def is_lost(self) -> bool:
        """Whether the lease could not be renewed: the engine may already run, and leaving the block raises the reason.
        True at the latest a third of the time to live after the lease was lost. Any thread may read it."""
        return self.renewal.done()


class PauseCalls(Protocol):
    """The three calls that a lease needs."""

    async def pause(
        self, mode: PauseMode | None, kv_policy: KvPolicy | None, *, holder: str, ttl_s: float, timeout_s: float
    ) -> PauseResult:
        """Takes a lease."""

    async def renew_pause(self, lease_id: str, *, ttl_s: float, timeout_s: float) -> PauseLease:
        """Extends the lease."""

    async def resume(self, lease_id: str) -> ResumeResult:
        """Ends the lease."""


@asynccontextmanager
async def held_pause(
    calls: PauseCalls,
    mode: PauseMode | None,
    kv_policy: KvPolicy | None,
    *,
    holder: str,
    ttl_s: float,
    timeout_s: float,
) -> AsyncIterator[HeldPause]:
    """See `ControlCalls.paused`."""
    paused = await calls.pause(mode, kv_policy, holder=holder, ttl_s=ttl_s, timeout_s=timeout_s)
    lease = paused.lease
    renewal = asyncio.create_task(_keep_renewing(calls, lease.lease_id, ttl_s), name=f"renew pause {lease.lease_id}")
    try:
        yield HeldPause(lease.lease_id, lease.holder, lease.mode, lease.expire_time, lease.fleet_lease_id, renewal)
    except Exception as error:
        try:
            await _give_back(calls, lease.lease_id, renewal)
        except PauseLeaseLostError as lost:
            raise lost from error
        except (GenserveError, ClientClosedError) as failure:
            error.add_note(f"the pause could not be ended: {failure}; lease {lease.lease_id} ends by itself")
        raise
    except BaseException as cancellation:  # must not be replaced by another error
        try:
            await _give_back(calls, lease.lease_id, renewal)
        except (GenserveError, ClientClosedError) as failure:
            cancellation.add_note(f"ending the pause: {failure}")
        raise
    else:
        await _give_back(calls, lease.lease_id, renewal)


async def _keep_renewing(calls: PauseCalls, lease_id: str, ttl_s: float) -> None:
    """Renews every third of the time to live, so that two failures are tolerated. Never returns; raises once the lease
    is lost."""
    clock = asyncio.get_running_loop().time
    renewed_at = clock()
    while True:
        await asyncio.sleep(ttl_s / 3)
        asked_at = clock()
        try:
            await calls.renew_pause(lease_id, ttl_s=ttl_s, timeout_s=ttl_s / 3)
            renewed_at = asked_at
        except (UnavailableError, DeadlineError) as error:
            if clock() - renewed_at >= ttl_s:
                raise PauseLeaseLostError(f"lease {lease_id} could not be renewed in time") from error


async def _give_back(calls: PauseCalls, lease_id: str, renewal: "asyncio.Task[None]") -> None:
    """Ends the renewal and the pause. Raises what ended the renewal, or PauseLeaseLostError if the lease was lost."""
    renewal.cancel()
    (failure,) = await asyncio.gather(renewal, return_exceptions=True)
    lost = failure if isinstance(failure, Exception) else None
    expired = False
    try:
        expired = (await calls.resume(lease_id)).lease_expired
    except GenserveError:
        if lost is None:
            raise
    if lost is not None:
        raise lost
    if expired:
        raise PauseLeaseLostError(f"lease {lease_id} had expired before the end of the block; the engine may have run")
