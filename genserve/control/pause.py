"""Pauses the engine at the first lease and resumes it when none is left.

Owns the transitions. They are serialised, so no two callers drive the engine at once. `leases` knows who holds leases
and when they end; `sleep` takes turns with pauses; the state board has the phase that forbids a transition.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from genserve.control.conditions import check_alive, check_control, may_run
from genserve.control.leases import LeaseTable, PauseLease, check_ttl
from genserve.control.state import StateBoard
from genserve.control.turn import EngineTurn, remaining_s, uninterrupted
from genserve.engine.protocol import Engine, Interruption
from genserve.engine.types import KvPolicy, PauseCounts, PauseMode
from genserve.errors import (
    DeadlineError,
    EngineDeadError,
    InvalidFieldError,
    PauseLeaseLostError,
)
from genserve.observe.histogram import Histogram
from genserve.observe.trace import step
from genserve.wire.bounds import check_text

_UNDO_TIMEOUT_S = 30.0
_TELL_TIMEOUT_S = 1.0
_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Standstill:
    """Whether generation stands still, and for how long. `lengths`: of the pauses that have ended, in seconds. `clock`
    gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.lengths = Histogram(_BOUNDS_S)
        self.is_on = False
        """Whether nothing is scheduled now."""
        self._clock = clock
        self._since_s = 0.0

    @property
    def seconds(self) -> float:
        """For how long it has lasted, 0 if generation runs."""
        return self._clock() - self._since_s if self.is_on else 0.0

    def set(self, *, on: bool) -> None:
        """It begins or ends now, unless it has before."""
        if on and not self.is_on:
            self._since_s = self._clock()
        elif self.is_on and not on:
            self.lengths.add(self.seconds)
        self.is_on = on


@dataclass(slots=True)
class Hold:
    """A pause for a push. `wait_s`: seconds until no other call drove the engine; `pause_s` and `resume_s`: those that
    pausing and resuming took. After the hold, `paused_s` is the time that generation was stopped, or None if it is
    still stopped; `interruption` is None if the block failed. `drops`: this pause dropped the keys and values of
    running requests."""

    kept: int
    aborted: int
    wait_s: float
    pause_s: float
    resume_s: float = 0.0
    paused_s: float | None = None
    drops: bool = False
    interruption: Interruption | None = None

    @property
    def recomputed_tokens(self) -> int | None:
        """Tokens to be computed again because of it; None until all clients have reported their part."""
        if not self.drops:
            return 0
        return None if self.interruption is None else self.interruption.num_computed_tokens


class PauseController:
    """Pauses and resumes the engine for those who hold leases, and for pushes."""

    def __init__(self, engine: Engine, leases: LeaseTable, board: StateBoard) -> None:
        self._engine = engine
        self._leases = leases
        self._board = board
        self.turn = EngineTurn(engine, board)
        """Whose turn it is to drive the engine, also for calls other than pauses."""
        self.standstill = Standstill()
        """Whether the engine is paused, and how long it was."""
        self._dropped = False  # the keys and values of the requests that a pause froze
        self._pausing: asyncio.Task[PauseCounts] | None = None
        self._changed = asyncio.Event()
        """Set when a lease may expire earlier than those before, and by `fail`."""
        self._failure: Exception | None = None

    async def pause(
        self,
        mode: PauseMode,
        kv_policy: KvPolicy,
        *,
        holder: str,
        ttl_s: float | None,
        request_id: str = "",
        fleet_lease_id: str = "",
        timeout_s: float,
    ) -> PauseLease:
        """Pauses the engine and returns a lease. With `ttl_s` None the lease never expires. `fleet_lease_id`: of the
        lease of the fleet that it is a part of.

        A repeated `request_id` of a live lease returns that lease. If the engine is paused already, WAIT behaves as
        KEEP, because frozen requests cannot finish; ABORT ends them; RECOMPUTE drops the cache. `counts` of the
        lease are then those of the frozen sequences.

        If the call fails, takes longer than `timeout_s` seconds or is cancelled, there is no lease, and the engine is
        as before, at the latest when the next caller gets a turn. Raises InvalidFieldError ("holder", "request_id",
        "fleet_lease_id", "ttl"), QueueFullError for too many leases, DeadlineError, DrainingError,
        EngineSleepingError and EngineDeadError.
        """
        check_ttl(ttl_s)
        check_text(holder, "holder")
        check_text(request_id, "request_id")
        check_text(fleet_lease_id, "fleet_lease_id")
        async with self.turn.take(timeout_s, by=f"the pause of {holder}" if holder else "another pause") as deadline_s:
            if (repeated := self._leases.repeated(request_id)) is not None:
                return repeated
            counts = await self.stand_still(mode, kv_policy, deadline_s)
            lease = self._leases.grant(holder, mode, ttl_s, request_id, fleet_lease_id, counts)
            self._changed.set()
            self._board.notify()
            return lease

    def renew(self, lease_id: str, ttl_s: float | None) -> PauseLease:
        """Extends a lease to `ttl_s` seconds from now; None = its own time to live. Raises PauseLeaseLostError and
        InvalidFieldError ("ttl")."""
        lease = self._leases.renew(lease_id, ttl_s)
        self._changed.set()
        self._board.notify()
        return lease

    def require(self, lease_id: str) -> PauseLease:
        """The lease, if it is live; raises PauseLeaseLostError otherwise."""
        return self._leases.require(lease_id)

    async def resume(self, lease_id: str, *, force: bool = False) -> bool:
        """Ends a lease, or with `force` every lease, and resumes the engine if none is left. Returns whether the lease
        had already ended without its holder.

        Waits while a push commits: a push holds no lease, and not even `force` resumes an engine whose weights are
        being exchanged. A tainted or sleeping engine is not resumed. Raises PauseLeaseLostError for an unknown lease,
        InvalidFieldError for a missing `lease_id`, and EngineDeadError.
        """
        if not lease_id and not force:
            raise InvalidFieldError.of("lease_id", "is required unless force is set")
        async with self.turn.take(by="a resume"):
            check_alive(self._board)
            lease_expired = False
            try:
                lease_expired = self._leases.release(lease_id)
            except PauseLeaseLostError:
                if not force:
                    raise
            if force:
                self._leases.release_all()
            self._board.notify()
            await self._run_if_free()
            return lease_expired

    def cancel_pending(self) -> None:
        """A pause that has not taken hold raises DrainingError: call when the daemon drains."""
        if self._pausing is not None:
            self._pausing.cancel()

    @asynccontextmanager
    async def undisturbed(self, timeout_s: float, by: str = "another call") -> AsyncIterator[None]:
        """Excludes pauses, resumes and commits during a long call to the engine: a commit that waited for it would look
        as if it hangs. `by`: the call, for those who wait. Raises as `pause`, but accepts a sleeping engine whose
        weights are awake."""
        async with self.turn.take(timeout_s, for_weights=True, by=by):
            yield

    @asynccontextmanager
    async def hold(
        self, mode: PauseMode, kv_policy: KvPolicy, *, timeout_s: float, lease_id: str = ""
    ) -> AsyncIterator[Hold]:
        """Pauses the engine for a push. Other pauses, resumes and expiries wait until the block ends.

        With `lease_id` this lease must be live (else PauseLeaseLostError), and the engine stays paused afterwards.
        Reset the board's phase, or enter TAINTED, before leaving. Raises as `pause`, but accepts a sleeping engine
        whose weights are awake, which stays asleep.
        """
        called_s = time.monotonic()
        async with self.turn.take(timeout_s, for_weights=True, by="a push") as deadline_s:
            began_s = time.monotonic()
            if lease_id:
                self._leases.require(lease_id)
            # What sleeps was dropped before.
            drops = kv_policy is KvPolicy.RECOMPUTE and not self._dropped and not self._board.asleep.tags
            counts = await self.stand_still(mode, kv_policy, deadline_s)
            paused_at_s = time.monotonic()
            hold = Hold(counts.kept, counts.aborted, began_s - called_s, paused_at_s - began_s, drops=drops)
            try:
                yield hold
                hold.interruption = self._engine.interrupted()
                if self._leases.active:  # no request waits for this, because nothing runs afterwards
                    await _told_soon(hold.interruption)
            finally:
                resume_s = time.monotonic()
                await self._run_if_free()
                ended_s = time.monotonic()
                hold.resume_s = ended_s - resume_s
                if not self.standstill.is_on:
                    # While WAIT waits, requests still run; the other modes stop them at once.
                    hold.paused_s = ended_s - (paused_at_s if mode is PauseMode.WAIT else began_s)

    async def run(self) -> None:
        """Ends expired leases. Never returns. Raises if the engine could not be resumed, by this task or any other
        call, because the daemon could not serve any more."""
        while True:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            try:
                async with asyncio.timeout(self._leases.next_expiry_s):
                    await self._changed.wait()
            except TimeoutError:
                async with self.turn.take(by="the end of a pause"):
                    if self._leases.expire():
                        self._board.notify()
                        await self._run_if_free()

    async def stand_still(self, mode: PauseMode, kv_policy: KvPolicy, deadline_s: float) -> PauseCounts:
        """Stops the engine for the caller that has the turn, and undoes it on failure. Raises as `pause`."""
        joins = self.standstill.is_on
        try:
            with step("pause"):
                if not joins or mode is PauseMode.ABORT:
                    counts = await self._pause_engine(mode, kv_policy, remaining_s(deadline_s, "pause"))
                    self.standstill.set(on=True)
                    self._dropped |= kv_policy is KvPolicy.RECOMPUTE
                    return counts
                if kv_policy is KvPolicy.RECOMPUTE:
                    await self._engine.reset_caches(remaining_s(deadline_s, "pause"))
                    self._dropped = True
        except EngineDeadError:
            raise
        except BaseException:
            await self.turn.undo(self.restore(paused=joins))
            raise
        load = self._engine.load()
        return PauseCounts(kept=load.running + load.waiting, aborted=0)

    async def _pause_engine(self, mode: PauseMode, kv_policy: KvPolicy, timeout_s: float) -> PauseCounts:
        """Raises DrainingError if a shutdown begins first."""
        self._pausing = asyncio.create_task(self._engine.pause(mode, kv_policy, timeout_s), name="pause")
        try:
            await asyncio.wait({self._pausing})
            if self._pausing.cancelled():
                check_control(self._board)
            return self._pausing.result()
        except DeadlineError as error:
            raise _still_running(error, mode, self._engine) from error
        finally:
            self._pausing.cancel()
            self._pausing = None

    async def restore(self, *, paused: bool) -> None:
        """Pauses or resumes an engine in an unknown state, for the caller that has the turn. An error here ends the
        daemon."""
        # After a failed pause the engine does not say whether it is paused.
        try:
            if paused:
                await self._engine.pause(PauseMode.KEEP, KvPolicy.REUSE, _UNDO_TIMEOUT_S)
            else:
                await self._engine.resume(_UNDO_TIMEOUT_S)
        except Exception as error:
            self.fail(error)
            raise
        self.standstill.set(on=paused)

    @property
    def is_leased(self) -> bool:
        """Whether the engine must be paused when it is awake. This does not change while a caller has the turn."""
        return bool(self._leases.active)

    def woke_up(self, *, paused: bool) -> None:
        """Records that the engine is awake, and whether it is paused. For the caller that has the turn."""
        self.standstill.set(on=paused)
        self._dropped = paused  # a sleep drops keys and values

    async def _run_if_free(self) -> None:
        if self.standstill.is_on and not self._leases.active and may_run(self._board.engine_condition):
            await uninterrupted(self._run_engine())

    async def _run_engine(self) -> None:
        try:
            with step("resume"):
                await self._engine.resume(_UNDO_TIMEOUT_S)
        except Exception as error:
            self.fail(error)
            raise
        self.standstill.set(on=False)
        self._dropped = False
        self._board.notify()

    def fail(self, error: Exception) -> None:
        """Makes `run` raise this error: the engine could not be resumed, so the daemon cannot serve any more."""
        self._failure = error
        self._changed.set()


def _still_running(error: DeadlineError, mode: PauseMode, engine: Engine) -> DeadlineError:
    """The error with what a pause that waits for requests has waited for."""
    if mode is not PauseMode.WAIT:
        return error.again()
    running = engine.load().running
    return DeadlineError(
        f"{error.message}: {running} sequences still run; allow more time, or choose the mode keep, which freezes them"
    )


async def _told_soon(interruption: Interruption) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_TELL_TIMEOUT_S):
            await interruption.told()
