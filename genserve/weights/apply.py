"""The transaction that turns staged bytes into the served weights: all of them, or none.

Generation runs while the new version is prepared beside the live one, and stops only for the exchange. A failed commit
is exchanged back. If this fails too, the resident bytes of the previous version are applied again. Only if this fails
as well is the engine tainted, and stopped until a push or a restart.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from genserve.control.conditions import EngineCondition
from genserve.control.pause import PauseController
from genserve.control.phase_admission import check_weights
from genserve.control.state import StateBoard
from genserve.control.turn import remaining_s, uninterrupted
from genserve.engine.protocol import Engine
from genserve.engine.types import ArenaRef
from genserve.errors import DeadlineError, EngineDeadError, EngineTaintedError, GenserveError, PushRolledBackError
from genserve.memory.arena import Arena
from genserve.tensors.manifest import Manifest
from genserve.weights.aftermath import Aftermath
from genserve.weights.early import EarlyPreparation
from genserve.weights.push.lifecycle import State
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.types import Applied, PrepareMode
from genserve.weights.resident import ArenaBytes, ResidentStore, ResidentVersion

_DISCARD_TIMEOUT_S = 30.0
_HEAL_TIMEOUT_S = 300.0
_AWAKE = (EngineCondition.RUNNING, EngineCondition.PAUSED, EngineCondition.APPLYING)

log = logging.getLogger(__name__)


class PushApplier:
    """Applies one push at a time; `PushRegistry` ensures this."""

    def __init__(self, engine: Engine, pauses: PauseController, board: StateBoard, resident: ResidentStore) -> None:
        self._engine = engine
        self._pauses = pauses
        self._board = board
        self._resident = resident
        self._lock = asyncio.Lock()
        self._applied_id = ""
        self._freeing: asyncio.Task[None] | None = None
        self._early: EarlyPreparation | None = None
        self._beginnings: set[asyncio.Task[None]] = set()
        self._aftermath = Aftermath()

    @asynccontextmanager
    async def between_pushes(self, timeout_s: float) -> AsyncIterator[None]:
        """Waits until the push that is being applied has ended and what it replaced is freed, and makes the next one
        wait. Raises DeadlineError, naming the push."""
        async with self._alone(timeout_s, lambda: self._still_under_way(timeout_s)):
            yield

    def _still_under_way(self, timeout_s: float) -> str:
        if not self._applied_id:
            return f"another sleep or wake-up was still in progress after {timeout_s:g} s"
        if self._freeing is not None:
            return f"what push {self._applied_id!r} replaced was still being freed after {timeout_s:g} s: call again"
        return (
            f"push {self._applied_id!r} was still being applied after {timeout_s:g} s: allow more time, or call again "
            "when GetPush says that it has ended"
        )

    async def restore_dropped(self) -> None:
        """Applies the served version over weights that were dropped or may be inconsistent. Call it between pushes,
        while nothing is scheduled. Raises EngineTaintedError."""
        await self.restore(
            EngineTaintedError(
                "the weights are missing or inconsistent after a sleep of level 2 or a failed commit; the engine "
                "stays asleep with its weights awake: push a complete version, then wake up the rest"
            )
        )

    def begin_early(self, push: LivePush) -> None:
        """Lets the workers prepare a push while its bytes arrive, as soon as nothing else is applied and unless
        something else is prepared early. It is given up for whatever is applied first, and for a sleep."""
        if not self._engine.takes_arriving_weights:
            return
        beginning = asyncio.create_task(self._begin_early(push), name=f"early preparation of push {push.push_id}")
        self._beginnings.add(beginning)
        beginning.add_done_callback(self._beginnings.discard)

    async def _begin_early(self, push: LivePush) -> None:
        attempt = push.attempt
        async with self._lock:
            arrives = push.lifecycle.state is State.RECEIVING and push.attempt is attempt and attempt.is_live
            if not arrives or self._early is not None or self._board.engine_condition not in _AWAKE:
                return
            try:
                early = self._early = EarlyPreparation(self._engine, push)
            except OSError as error:
                log.warning("push %s is prepared when its bytes are there: %s", push.push_id, error)
                return
        while self._early is early:
            await early.wait_attempt()
            async with self._lock:  # the next attempt may have begun meanwhile, and go on with it
                if self._early is early and early.is_useless:
                    await self._end_early(_DISCARD_TIMEOUT_S)

    async def _end_early(self, timeout_s: float) -> None:
        """For the caller that has the lock."""
        early, self._early = self._early, None
        if early is not None:
            early.end()
            await self._discard(early.nonce, timeout_s)

    async def apply(self, push: LivePush) -> Applied:
        """Prepares, pauses, commits and resumes, all within the header's `apply.timeout_s`. What was replaced is freed
        after the answer, before anything else is applied.

        On any error the previous version is served and the engine is as it was: PauseLeaseLostError, DeadlineError,
        DrainingError, EngineDeadError, EngineSleepingError when a sleep of the weights came first, and
        PushRolledBackError for what went wrong in the engine. The exception is EngineTaintedError: the live weights are
        unknown then, and the engine is stopped. Undoing a late push takes time beyond the timeout.

        `verify` is the time that checksums took while bytes were received, so it is part of `receive` as well.
        `prepare` is what was left of it when every byte was there.
        """
        deadline_s = time.monotonic() + push.header.apply.timeout_s
        too_late = "no time was left to prepare; nothing changed"
        async with self._alone(push.header.apply.timeout_s, lambda: too_late, push):
            self._applied_id = push.push_id
            check_weights(self._board.engine_condition, self._board.daemon_condition)
            return await self._apply(push, deadline_s)

    @asynccontextmanager
    async def _alone(
        self, timeout_s: float, too_late: Callable[[], str], push: LivePush | None = None
    ) -> AsyncIterator[None]:
        """Nothing else is applied in the block, and nothing else than `push` is prepared."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineError(too_late()) from None
        try:
            if self._early is not None and self._early.push is not push:
                await self._end_early(min(timeout_s, _DISCARD_TIMEOUT_S))
            yield
        finally:
            if self._freeing is None:  # otherwise the task releases the lock when it has freed what was replaced
                self._release()

    def _release(self) -> None:
        self._applied_id = ""
        self._lock.release()

    async def _free(self, nonce: str, applied: Applied) -> None:
        """Frees what a push has replaced, and only then lets others have their turn."""
        began_s = time.perf_counter()
        try:
            if await self._discard(nonce):
                applied.discard_s = time.perf_counter() - began_s
        finally:
            self._freeing = None
            self._release()

    async def _apply(self, push: LivePush, deadline_s: float) -> Applied:
        options = push.header.apply
        previous_version = self._engine.weight_version
        if options.pause_lease_id:
            self._pauses.require(options.pause_lease_id)  # reported now, not after a long preparation
        early, self._early = self._early, None
        nonce = uuid.uuid4().hex if early is None else early.nonce
        prepare_s = 0.0
        try:
            if options.prepare_mode is PrepareMode.RUNNING:
                prepare_s = await self._finish(push, early, nonce, deadline_s)
            async with self._pauses.hold(
                options.pause_mode,
                options.kv_policy,
                timeout_s=remaining_s(deadline_s, "pause"),
                lease_id=options.pause_lease_id,
            ) as hold:
                if options.prepare_mode is PrepareMode.PAUSED:
                    prepare_s = await self._finish(push, early, nonce, deadline_s)
                commit_s = await self._commit(push, nonce, deadline_s)
        except BaseException as error:
            if early is not None:
                early.end()
            # A worker that hangs answers a discard only when it continues; the trainer gets its answer on time.
            await self._discard(nonce, 1.0 if isinstance(error, DeadlineError) else _DISCARD_TIMEOUT_S)
            if not isinstance(error, Exception):
                raise
            if push.is_served:
                raise GenserveError(f"the new version is live, but the engine could not be resumed: {error}") from error
            if isinstance(error, GenserveError):
                raise
            raise PushRolledBackError(f"the weights could not be applied; nothing changed: {error!r}") from error
        steps = {
            "receive": push.staging.receive_s,
            "verify": push.staging.verify_s,
            "prepare": prepare_s,
            "pause": hold.pause_s,
            "commit": commit_s,
            "resume": hold.resume_s,
        }
        applied = Applied.in_hold(previous_version, push.header.weight_version, steps, hold)
        self._aftermath.follow(applied, hold)
        # Neither requests nor the trainer wait while memory is freed. The workers free it after their next step, which
        # may compute every running request again.
        self._freeing = asyncio.create_task(self._free(nonce, applied), name="freeing replaced weights")
        return applied

    async def _finish(self, push: LivePush, early: EarlyPreparation | None, nonce: str, deadline_s: float) -> float:
        """Prepares a push whose bytes are all there, or waits for its early preparation; seconds it took."""
        began_s, timeout_s = time.perf_counter(), remaining_s(deadline_s, "prepare")
        if early is None:
            await self._prepare(nonce, push.weights, push.arena, timeout_s, push.push_id)
        elif not await early.finish(timeout_s):
            raise DeadlineError(f"prepare did not finish within {timeout_s:g} s")
        return time.perf_counter() - began_s

    async def _prepare(self, nonce: str, weights: Manifest, arena: Arena, timeout_s: float, push_id: str = "") -> None:
        """Without a `push_id` the bytes are those of the resident version."""
        where = ArenaRef(arena.path, weights.total_bytes, push_id)
        await self._engine.prepare_weights(nonce, where, weights.tensors, timeout_s)

    async def _commit(self, push: LivePush, nonce: str, deadline_s: float) -> float:
        """Exchanges the weights; seconds it took."""
        timeout_s = remaining_s(deadline_s, "commit")
        # If a push into a tainted engine fails, the engine stays tainted.
        if_failed = EngineCondition.TAINTED if self._board.engine_condition is EngineCondition.TAINTED else None
        push.lifecycle.applying()
        began_s = time.perf_counter()
        with self._board.applying(if_failed):
            healed = await uninterrupted(self._commit_or_heal(push, nonce, timeout_s))
        if healed is not None:
            raise PushRolledBackError(
                f"the commit failed, version {self._engine.weight_version} was applied again: {healed}"
            )
        return time.perf_counter() - began_s

    async def _commit_or_heal(self, push: LivePush, nonce: str, timeout_s: float) -> EngineTaintedError | None:
        """Commits. Returns the reason if the previous version had to be applied again, None if the push is served."""
        version = push.header.weight_version
        try:
            await self._engine.commit_weights(nonce, version, timeout_s)
        except (PushRolledBackError, DeadlineError, EngineDeadError):
            raise
        except EngineTaintedError as error:
            cause = error
        except Exception as error:
            # The engine promises to report the state that it left. An unknown error says nothing about it.
            cause = EngineTaintedError(f"the commit failed in an unknown way: {error!r}")
        else:
            # In one turn of the event loop: whoever hears of the version finds its bytes.
            push.serve()
            source, digest = ArenaBytes(push.arena), push.header.content_digest
            self._resident.replace(ResidentVersion(version, push.weights, source, push.push_id, digest))
            self._board.tell_applied()
            return None
        log.error("%s; applying version %d again", cause, self._engine.weight_version)
        await self.restore(cause)
        return cause

    async def restore(self, cause: EngineTaintedError) -> None:
        """Applies the resident version over weights that are unknown because of `cause`. Only while nothing is
        scheduled. Raises EngineTaintedError if it cannot."""
        nonce = uuid.uuid4().hex
        try:
            version = self._resident.require()
            async with version.as_arena() as arena:
                await self._prepare(nonce, version.manifest, arena, _HEAL_TIMEOUT_S)
                await self._engine.commit_weights(nonce, version.weight_version, _HEAL_TIMEOUT_S)
                self._board.tell_applied()
        except EngineDeadError:
            raise
        except Exception as error:
            raise EngineTaintedError(f"{cause.message}; and the previous version could not be restored: {error}") from (
                cause
            )
        finally:
            await self._discard(nonce)

    async def _discard(self, nonce: str, timeout_s: float = _DISCARD_TIMEOUT_S) -> bool:
        """Whether it was freed."""
        try:
            await uninterrupted(self._engine.discard_weights(nonce, timeout_s))
            return True
        except EngineDeadError:
            pass  # its memory is freed with the engine
        except Exception:
            log.exception("weights that are not needed any more could not be freed")
        return False
