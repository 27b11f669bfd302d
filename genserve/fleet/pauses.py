"""Pauses of all replicas under one lease."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from weakref import WeakValueDictionary

from genserve.errors import DeadlineError, GenserveError, InvalidFieldError, PauseLeaseLostError
from genserve.fleet.deadlines import ASK_S, RESUME_S, pause_s
from genserve.fleet.everywhere import everywhere
from genserve.fleet.fleet import Fleet
from genserve.fleet.leases import FleetLease, holder_with, new_lease_id
from genserve.fleet.upstream import Upstream
from genserve.v1 import control_pb2

MAX_HOLDER_CHARS: Final = 200
"""What is left of a daemon's limit beside the name of the fleet's lease."""


@dataclass(frozen=True, slots=True)
class _Granted:
    """A pause of all replicas: the answer, and whether this call has begun the lease."""

    answer: control_pb2.PauseResponse
    is_new: bool


class FleetPauses:
    """Pauses and resumes all replicas that answer."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._undoing: set[asyncio.Task[None]] = set()

    async def pause(self, request: control_pb2.PauseRequest) -> control_pb2.PauseResponse:
        """Pauses all replicas, or none: raises the error of the first one that is not paused. If the call is cancelled,
        a lease that it has begun ends on all of them, because nobody was told its id. Calls for one lease take turns,
        and this is a part of the turn."""
        if len(request.holder) > MAX_HOLDER_CHARS:
            raise InvalidFieldError.of("holder", f"must have at most {MAX_HOLDER_CHARS} characters")
        lease_id = new_lease_id(request.request_id)
        turn = await self._take(lease_id, pause_s(request))
        pausing = asyncio.create_task(self._pause(request, lease_id), name="pause")
        undoing = None
        try:
            return (await asyncio.shield(pausing)).answer
        except asyncio.CancelledError:
            undoing = asyncio.create_task(self._undo(pausing, lease_id, turn), name="undo a pause")
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise
        finally:
            if undoing is None:
                turn.release()

    async def _take(self, lease_id: str, timeout_s: float) -> asyncio.Lock:
        """Takes the turn of a lease. Whoever takes it releases it. Raises DeadlineError."""
        turn = self._turns.setdefault(lease_id, asyncio.Lock())
        try:
            async with asyncio.timeout(timeout_s):
                await turn.acquire()
        except TimeoutError:
            raise DeadlineError(f"another pause or resume of this lease took {timeout_s:g} s") from None
        return turn

    async def _undo(self, pausing: asyncio.Task[_Granted], lease_id: str, turn: asyncio.Lock) -> None:
        """Waits until the cancelled pause has finished, ends its lease if it is a new one, and then the turn."""
        try:
            await asyncio.wait({pausing})
            with suppress(GenserveError):  # a pause that has failed has undone what it did
                if pausing.result().is_new:
                    await self._end(lease_id)
        finally:
            turn.release()

    async def _pause(self, request: control_pb2.PauseRequest, lease_id: str) -> _Granted:
        own = control_pb2.PauseRequest()
        own.CopyFrom(request)
        own.holder, own.request_id = holder_with(request.holder, lease_id), lease_id
        limit_s = pause_s(request)
        known = self._fleet.leases.known(lease_id)
        before = {} if known is None else {address: each.lease_id for address, each in known.on_replicas.items()}
        with self._fleet.leases.being_granted(lease_id) as is_new:
            outcomes = await everywhere(
                self._fleet.answering, lambda upstream: upstream.ask(upstream.control.Pause, own, limit_s)
            )
            granted = {each: got for each, got in outcomes.items() if not isinstance(got, GenserveError)}
            # A replica that is lost is paused when it is back.
            failures = [
                got for each, got in outcomes.items() if isinstance(got, GenserveError) and not each.member.failure
            ]
            # If the lease had expired before the router was told so, all that had it have granted another one.
            now = {each.address: got.lease.lease_id for each, got in granted.items()}
            is_new = is_new or all(now.get(address, own_id) != own_id for address, own_id in before.items())
            if failures or not granted:
                if is_new:
                    self._fleet.leases.ended(lease_id)
                    await asyncio.shield(everywhere(granted, lambda each: _resume(each, granted[each].lease.lease_id)))
                raise failures[0].again() if failures else self._fleet.none_ready()
        self._fleet.leases.begun(lease_id)
        for upstream, got in granted.items():
            self._fleet.leases.granted(lease_id, request.holder, upstream.address, got.lease)
        self._fleet.refresh()
        answer = control_pb2.PauseResponse(
            lease=self._fleet.leases.get(lease_id).message(),
            requests_kept=sum(got.requests_kept for got in granted.values()),
            requests_aborted=sum(got.requests_aborted for got in granted.values()),
        )
        return _Granted(answer, is_new)

    async def renew(self, request: control_pb2.RenewPauseRequest) -> control_pb2.RenewPauseResponse:
        """Extends the lease on all replicas that have it. Raises PauseLeaseLostError if none has."""
        lease = self._fleet.leases.get(request.lease_id)
        on_replicas = dict(lease.on_replicas)  # a replica may tell that it does not have it any more

        async def renew_one(upstream: Upstream) -> control_pb2.RenewPauseResponse:
            own = control_pb2.RenewPauseRequest(lease_id=on_replicas[upstream.address].lease_id)
            if request.HasField("ttl"):
                own.ttl.CopyFrom(request.ttl)
            return await upstream.ask(upstream.control.RenewPause, own, ASK_S)

        outcomes = await everywhere(self._having(lease), renew_one)
        for upstream, outcome in outcomes.items():
            if not isinstance(outcome, GenserveError):
                self._fleet.leases.granted(lease.lease_id, lease.holder, upstream.address, outcome.lease)
        renewed = [each for each in outcomes.values() if not isinstance(each, GenserveError)]
        if not renewed:
            errors = [each for each in outcomes.values() if isinstance(each, GenserveError)]
            raise errors[0].again() if errors else PauseLeaseLostError(f"no replica has the lease {lease.lease_id!r}")
        self._fleet.refresh()
        return control_pb2.RenewPauseResponse(lease=self._fleet.leases.get(lease.lease_id).message())

    async def resume(self, request: control_pb2.ResumeRequest) -> control_pb2.ResumeResponse:
        """Ends the lease on all replicas, or with `force` every lease on every replica."""
        if request.force:
            for lease in self._fleet.leases.active:
                self._fleet.leases.ended(lease.lease_id)
            own = control_pb2.ResumeRequest(force=True)
            outcomes = await everywhere(
                self._fleet.answering,
                lambda upstream: upstream.ask(upstream.control.Resume, own, RESUME_S),
            )
            _raise_first(outcomes)
            self._fleet.refresh()
            return control_pb2.ResumeResponse()
        if not request.lease_id:
            raise InvalidFieldError.of("lease_id", "is required unless force is set")
        turn = await self._take(request.lease_id, RESUME_S)  # a pause that it overtook would grant the lease again
        try:
            return control_pb2.ResumeResponse(lease_expired=await self._end(request.lease_id))
        finally:
            turn.release()

    async def _end(self, lease_id: str) -> bool:
        """Ends a lease on all replicas; whether it had expired on one of them."""
        known = self._fleet.leases.known(lease_id)
        if known is None:
            if self._fleet.leases.was_ended(lease_id):
                return True
            raise PauseLeaseLostError(f"no pause lease {lease_id!r} is known", metadata={"lease_id": lease_id})
        on_replicas = dict(known.on_replicas)
        self._fleet.leases.ended(lease_id)

        async def resume_one(upstream: Upstream) -> bool:
            expired = await _resume(upstream, on_replicas[upstream.address].lease_id)
            self._fleet.leases.resumed(lease_id, upstream.address)
            return expired

        outcomes = await everywhere(self._having(known), resume_one)
        self._fleet.refresh()
        _raise_first(outcomes)
        return any(outcome is True for outcome in outcomes.values())

    def _having(self, lease: FleetLease) -> list[Upstream]:
        return [upstream for upstream in self._fleet.answering if upstream.address in lease.on_replicas]


async def _resume(upstream: Upstream, lease_id: str) -> bool:
    """Ends the lease of a replica; whether it had expired."""
    try:
        request = control_pb2.ResumeRequest(lease_id=lease_id)
        answer = await upstream.ask(upstream.control.Resume, request, RESUME_S)
    except PauseLeaseLostError:
        return True
    return bool(answer.lease_expired)


def _raise_first(outcomes: Mapping[Upstream, object]) -> None:
    for upstream, outcome in outcomes.items():
        if isinstance(outcome, GenserveError) and not upstream.member.failure:
            raise outcome.again()
