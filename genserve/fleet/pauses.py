"""Pauses of all replicas under one lease, and their sleep."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from genserve.errors import (
    DeadlineError,
    DrainingError,
    GenserveError,
    InvalidFieldError,
    PauseLeaseLostError,
    UnavailableError,
)
from genserve.fleet.everywhere import everywhere, not_asked, of_all, write_record
from genserve.fleet.fleet import Fleet
from genserve.fleet.leases import FleetLease, Grant, Leases, is_lease_id, new_lease_id
from genserve.fleet.upstream import ASK_S, RESUME_S, WAKE_S, Upstream, pause_s
from genserve.rpc.convert.control import sleep_arguments
from genserve.v1 import control_pb2
from genserve.wire.bounds import check_text

T = TypeVar("T")
LeasingT = TypeVar("LeasingT", control_pb2.PauseResponse, control_pb2.RenewPauseResponse)


class FleetPauses:
    """Pauses and resumes all replicas that answer."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._undoing: set[asyncio.Task[None]] = set()

    async def pause(self, request: control_pb2.PauseRequest) -> control_pb2.PauseResponse:
        """Pauses all replicas that answer, or none: raises the error of the first one that is not paused, and
        PauseLeaseLostError if somebody ends the lease meanwhile.

        Calls for one lease take turns. If the call fails or is cancelled, a lease that it has begun ends on all
        replicas, because nobody was told its id, and the turn ends after that.
        """
        check_text(request.holder, "holder")
        leases, lease_id, timeout_s = self._fleet.leases, new_lease_id(request.request_id), pause_s(request)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        leases.check_room(lease_id, request.holder)
        try:
            turn = await self._fleet.lease_turns.take(lease_id, timeout_s)
        except TimeoutError:
            raise DeadlineError(f"other pauses and resumes took {timeout_s:g} s") from None
        try:
            with leases.being_granted(lease_id) as grant:
                answer = await self._pause(request, lease_id, grant, deadline_s)
            self._fleet.changed()  # now that the lease counts
            await write_record(self._fleet)
        except BaseException as error:
            if not grant.is_new and not leases.was_ended(lease_id):
                turn.release()
                raise
            leases.mark_ended(lease_id)
            undoing = self._begin_undoing(lease_id, turn)
            if isinstance(error, GenserveError):
                await asyncio.wait({undoing}, timeout=ASK_S)
            raise
        turn.release()
        return answer

    def _begin_undoing(self, lease_id: str, turn: asyncio.Lock) -> asyncio.Task[None]:
        """Ends a lease, and then the turn. A replica that does not answer is resumed when it does."""

        async def undo() -> None:
            try:
                with suppress(GenserveError):
                    await self._end(lease_id)
            finally:
                turn.release()

        undoing = asyncio.create_task(undo(), name="undo a pause")
        self._undoing.add(undoing)
        undoing.add_done_callback(self._undoing.discard)
        return undoing

    async def _pause(
        self, request: control_pb2.PauseRequest, lease_id: str, grant: Grant, deadline_s: float
    ) -> control_pb2.PauseResponse:
        own = control_pb2.PauseRequest()
        own.CopyFrom(request)
        own.request_id = own.fleet_lease_id = lease_id
        leases, loop = self._fleet.leases, asyncio.get_running_loop()

        async def pause_one(upstream: Upstream) -> control_pb2.PauseResponse | None:
            call, timeout_s = upstream.control.Pause, max(0.0, deadline_s - loop.time())
            try:
                got = await leased_by(upstream, leases, lease_id, request.holder, call, own, timeout_s)
            except DrainingError:
                return None  # the next run at its address is paused when it is there
            grant.own_ids[upstream.address] = got.lease.lease_id
            return got

        asked: dict[Upstream, int] = {}
        outcomes: dict[Upstream, control_pb2.PauseResponse | GenserveError | None] = {}
        while more := not_asked(self._fleet, asked):
            outcomes |= await _unless_lost(more, pause_one)
            if leases.was_ended(lease_id):
                raise PauseLeaseLostError(f"somebody has ended the pause lease {lease_id!r} while it was being granted")
            _raise_first(outcomes)
        if leases.known(lease_id) is None:
            raise self._fleet.none_ready()
        granted = [got for got in outcomes.values() if isinstance(got, control_pb2.PauseResponse)]
        return control_pb2.PauseResponse(
            lease=leases.get(lease_id).message(),
            requests_kept=sum(got.requests_kept for got in granted),
            requests_aborted=sum(got.requests_aborted for got in granted),
        )

    async def renew(self, request: control_pb2.RenewPauseRequest) -> control_pb2.RenewPauseResponse:
        """Extends the lease on all replicas that have it. Raises PauseLeaseLostError if none has."""
        lease = self._fleet.leases.get(request.lease_id)
        on_replicas = dict(lease.on_replicas)  # a replica may tell that it does not have it any more

        async def renew_one(upstream: Upstream) -> control_pb2.RenewPauseResponse:
            own = control_pb2.RenewPauseRequest(lease_id=on_replicas[upstream.address].lease_id)
            if request.HasField("ttl"):
                own.ttl.CopyFrom(request.ttl)
            call, leases = upstream.control.RenewPause, self._fleet.leases
            return await leased_by(upstream, leases, lease.lease_id, lease.holder, call, own, ASK_S)

        outcomes = await everywhere(self._having(lease), renew_one)
        renewed = [each for each in outcomes.values() if not isinstance(each, GenserveError)]
        if not renewed:
            errors = [each for each in outcomes.values() if isinstance(each, GenserveError)]
            raise errors[0].again() if errors else PauseLeaseLostError(f"no replica has the lease {lease.lease_id!r}")
        done = [each.address for each, outcome in outcomes.items() if not isinstance(outcome, GenserveError)]
        self._fleet.leases.renewed(lease.lease_id, done)
        self._fleet.refresh()
        return control_pb2.RenewPauseResponse(lease=self._fleet.leases.get(lease.lease_id).message())

    async def resume(self, request: control_pb2.ResumeRequest) -> control_pb2.ResumeResponse:
        """Ends the lease on all replicas, or with `force` every lease on every replica. A replica that does not answer
        is resumed when it does, also if the call is cancelled."""
        if request.force:
            with self._fleet.lease_turns.holding_off():
                await self._end_all()
            await write_record(self._fleet)
            return control_pb2.ResumeResponse()
        if not request.lease_id:
            raise InvalidFieldError.of("lease_id", "is required unless force is set")
        with self._fleet.lease_turns.holding_off(request.lease_id):
            expired = await self._end(request.lease_id)
        await write_record(self._fleet)
        return control_pb2.ResumeResponse(lease_expired=expired)

    async def _end_all(self) -> None:
        self._fleet.leases.mark_all_ended()
        own = control_pb2.ResumeRequest(force=True)
        try:
            outcomes = await _unless_lost(
                self._fleet.answering,
                lambda upstream: upstream.ask(upstream.control.Resume, own, RESUME_S),
            )
        finally:
            self._fleet.changed()
        _raise_first(outcomes)

    async def _end(self, lease_id: str) -> bool:
        """Ends a lease on all replicas; whether somebody else had, or it had expired on one of them. For callers that
        have its turn, or that say that they end it."""
        leases = self._fleet.leases
        known = leases.known(lease_id)
        if known is None and not leases.is_beginning(lease_id):
            if leases.was_ended(lease_id):
                return leases.was_ended_by_others(lease_id)
            if not self._fleet.answering:  # one of them may have it
                raise self._fleet.none_ready()
            if is_lease_id(lease_id):
                leases.mark_ended(lease_id, by_others=True)  # a replica may tell it later than it should
            raise PauseLeaseLostError(f"no pause lease {lease_id!r} is known", metadata={"lease_id": lease_id})
        if known is not None and not known.on_replicas and not self._fleet.answering:
            raise self._fleet.none_ready()  # nobody can say whether it has expired
        by_others = leases.was_ended_by_others(lease_id)
        leases.mark_ended(lease_id, by_others=by_others)
        on_replicas = {} if known is None else dict(known.on_replicas)

        async def resume_one(upstream: Upstream) -> bool:
            expired = await resume_on(upstream, on_replicas[upstream.address].lease_id)
            leases.resumed(lease_id, upstream.address)
            return expired

        having = [each for each in self._fleet.answering if each.address in on_replicas]
        try:
            outcomes = await _unless_lost(having, resume_one)
        finally:
            self._fleet.changed()
        _raise_first(outcomes)
        by_others = by_others or any(outcome is True for outcome in outcomes.values())
        leases.mark_ended(lease_id, by_others=by_others)
        return by_others

    def _having(self, lease: FleetLease) -> list[Upstream]:
        return [upstream for upstream in self._fleet.answering if upstream.address in lease.on_replicas]


async def leased_by(
    upstream: Upstream,
    leases: Leases,
    lease_id: str,
    holder: str,
    call: Callable[..., Awaitable[LeasingT]],
    request: Any,
    timeout_s: float,
) -> LeasingT:
    """The answer of a replica that grants a lease of the fleet, or renews it, which is noted.

    Raises UnavailableError if the replica is lost before the answer is taken, though it had come: the next run at that
    address lacks the lease, and would be taken for one where somebody has ended it.
    """
    num_losses = upstream.member.num_losses
    got = await upstream.ask(call, request, timeout_s)
    if upstream.member.was_lost_since(num_losses):
        raise UnavailableError(f"replica {upstream.address} was lost when it had answered")
    leases.granted(lease_id, holder, upstream.address, upstream.member.clock.lease(got.lease))
    return got


async def resume_on(upstream: Upstream, lease_id: str) -> bool:
    """Ends the lease of a replica; whether it had expired."""
    try:
        request = control_pb2.ResumeRequest(lease_id=lease_id)
        answer = await upstream.ask(upstream.control.Resume, request, RESUME_S)
    except PauseLeaseLostError:
        return True
    return bool(answer.lease_expired)


async def _unless_lost(
    replicas: Iterable[Upstream], ask: Callable[[Upstream], Awaitable[T]]
) -> dict[Upstream, T | GenserveError]:
    """As `everywhere`, without those that fail and are lost meanwhile, whichever is noticed first. When they are back,
    as they may be already, they are paused or resumed as the fleet is."""
    num_losses = {each: each.member.num_losses for each in replicas}
    outcomes = await everywhere(num_losses, ask)
    return {
        each: outcome
        for each, outcome in outcomes.items()
        if not (isinstance(outcome, GenserveError) and each.member.was_lost_since(num_losses[each]))
    }


def _raise_first(outcomes: Mapping[Upstream, object]) -> None:
    for outcome in outcomes.values():
        if isinstance(outcome, GenserveError):
            raise outcome.again()


class FleetSleeps:
    """Puts all replicas that answer to sleep, and wakes them up."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def sleep(self, request: control_pb2.SleepRequest) -> None:
        """Releases the memory of all; if one of them fails, those that fell asleep wake up again."""
        fleet, limit_s = self._fleet, pause_s(request)
        await fleet.until_known()
        awake: list[Upstream] = []

        async def sleep_one(upstream: Upstream) -> control_pb2.SleepResponse:
            if upstream.member.engine is not None and not upstream.member.engine.asleep_tags:
                awake.append(upstream)
            return await upstream.ask(upstream.control.Sleep, request, limit_s)

        async def undo(upstream: Upstream) -> None:
            if upstream in awake:
                await upstream.ask(upstream.control.WakeUp, control_pb2.WakeUpRequest(), WAKE_S)

        _, depth, _ = sleep_arguments(request)
        with fleet.changing_sleep(lambda before: before.after_sleep(depth)):
            await of_all(fleet, sleep_one, undo)
        fleet.changed()
        await write_record(fleet)

    async def wake_up(self, request: control_pb2.WakeUpRequest) -> None:
        """Wakes all up."""
        fleet = self._fleet
        await fleet.until_known()
        with fleet.changing_sleep(lambda before: before.after_wake_up(request.tags)):
            await of_all(fleet, lambda each: each.ask(each.control.WakeUp, request, WAKE_S))
        fleet.changed()
        await write_record(fleet)
