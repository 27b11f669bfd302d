"""The transaction that turns staged bytes into the served weights: all of them, or none.

Generation runs while the new version is prepared beside the live one, and stops only for the exchange. What is prepared
may also wait for a later commit. A failed commit is exchanged back. If this fails too, the resident bytes of the
previous version are applied again. Only if this fails as well is the engine tainted, and stopped until a push or a
restart.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from genserve.control.conditions import EngineCondition, check_weights
from genserve.control.pause import Hold, PauseController
from genserve.control.state import StateBoard
from genserve.control.turn import remaining_s, uninterrupted
from genserve.engine.protocol import Engine, Interruption
from genserve.engine.types import ArenaRef
from genserve.errors import DeadlineError, EngineDeadError, EngineTaintedError, GenserveError, PushRolledBackError
from genserve.memory.arena import Arrival
from genserve.observe.trace import step
from genserve.weights.push.lifecycle import State
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.types import Applied, ApplyOptions, PrepareMode
from genserve.weights.resident import ResidentStore

_DISCARD_TIMEOUT_S = 30.0
_HEAL_TIMEOUT_S = 300.0
_TOO_LATE = "no time was left to prepare; nothing changed"
_UNTIMED_S = 24 * 3600.0  # for bytes that still arrive: what ends first is the push, by its time to live
_UNWANTED = frozenset({State.STAGED, State.FAILED, State.APPLIED, State.GONE})
_AWAKE = (EngineCondition.RUNNING, EngineCondition.PAUSED, EngineCondition.APPLYING)

log = logging.getLogger(__name__)


class Preparation:
    """A version that workers prepare beside the live one, and keep until it is used.

    Begins when it is made. Either wait for its `task` and use what is prepared, or `end` it and discard that.

    Bytes that have arrived do not change, so nothing that is prepared from them is wrong later; whether all of them may
    be applied is checked when the last one is there, as for any push.
    """

    def __init__(self, engine: Engine, push: LivePush, timeout_s: float | None = None) -> None:
        """Without a `timeout_s` bytes still arrive: workers wait for them. Raises OSError then if the process has too
        many files open."""
        self.push = push
        self.nonce = uuid.uuid4().hex
        self._arrival = Arrival() if timeout_s is None else None
        if self._arrival is not None:
            push.staging.tell_arrival(self._arrival)
        weights, arrival_path = push.staging.weights, "" if self._arrival is None else self._arrival.path
        where = ArenaRef(push.staging.arena.path, weights.total_bytes, push.push_id, arrival_path)
        limit_s = _UNTIMED_S if timeout_s is None else timeout_s
        preparing = engine.weights.prepare(self.nonce, where, weights.tensors, limit_s)
        self.task = asyncio.create_task(preparing, name=f"preparing push {push.push_id}")
        self.task.add_done_callback(self._close)
        self.has_limit = timeout_s is not None
        """Whether the engine has a time limit of its own."""
        self.waited_s = 0.0
        """Seconds for which the push has waited for it since every byte was there."""

    @property
    def is_useless(self) -> bool:
        """Whether nobody will need it: the push is gone, or its present attempt has ended without all of its bytes, or
        it waits for a commit and is not prepared."""
        if self.push.lifecycle.state is State.RECEIVING:
            return self.push.attempt.result.done()
        return self.push.lifecycle.state in _UNWANTED

    def end(self) -> None:
        """Stops waiting. What workers have prepared, or still prepare, is to be discarded: a push that is prepared is
        staged again."""
        self.task.cancel()
        self.push.unprepare()
        self.push.changed.notify()

    def _close(self, task: "asyncio.Task[None]") -> None:
        if self._arrival is not None:
            self.push.staging.tell_arrival(None)
            self._arrival.close()
        if not task.cancelled():
            task.exception()  # if nobody waits for it, nobody else retrieves it


class PushApplier:
    """Applies one push of weights at a time, and holds the one version that workers prepare; `PushRegistry` ensures
    this."""

    def __init__(self, engine: Engine, pauses: PauseController, board: StateBoard, resident: ResidentStore) -> None:
        self._engine = engine
        self._pauses = pauses
        self._board = board
        self._resident = resident
        self._lock = asyncio.Lock()
        self._applied_id = ""
        self._freeing: asyncio.Task[None] | None = None
        self._preparation: Preparation | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: set[asyncio.Task[None]] = set()

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
        something else is prepared. It is given up for whatever is applied first, and for a sleep."""
        if self._engine.weights.takes_arriving:
            self._start(self._begin_early(push), f"early preparation of push {push.push_id}")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin_early(self, push: LivePush) -> None:
        attempt = push.attempt
        async with self._lock:
            arrives = push.lifecycle.state is State.RECEIVING and push.attempt is attempt and attempt.is_live
            if not arrives or self._preparation is not None or self._board.engine_condition not in _AWAKE:
                return
            try:
                self._preparation = preparation = Preparation(self._engine, push)
            except OSError as error:
                log.warning("push %s is prepared when its bytes are there: %s", push.push_id, error)
                return
        await self._watch(preparation)

    async def _watch(self, preparation: Preparation) -> None:
        """Keeps what is prepared until it is used, or nobody needs it any more."""
        while self._preparation is preparation:
            if not preparation.is_useless:
                await preparation.push.changed.wait()
                continue
            async with self._lock:  # the next attempt may have begun meanwhile, and go on with it
                if self._preparation is preparation and preparation.is_useless:
                    await self._end_preparation(_DISCARD_TIMEOUT_S)

    async def _end_preparation(self, timeout_s: float) -> None:
        """For the caller that has the lock. A push that was prepared is staged again."""
        preparation, self._preparation = self._preparation, None
        if preparation is not None:
            preparation.end()
            await self._discard(preparation.nonce, timeout_s)

    def holds(self, push: LivePush) -> bool:
        """Whether workers hold this push, or build it, from what is staged."""
        return self._preparation is not None and self._preparation.push is push

    async def close(self) -> None:
        """Returns when nothing is prepared any more. Call it when all pushes are gone."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def prepare(self, push: LivePush, digesting: "asyncio.Task[None]") -> None:
        """Prepares, within the header's `apply.timeout_s`, and when `digesting` has ended too the push is prepared:
        `apply` uses it. Until then anything else that is applied, and a sleep, ends it; nothing waits for it. Raises as
        `apply`: then nothing is prepared."""
        deadline_s = time.monotonic() + push.header.apply.timeout_s
        async with self._alone(push.header.apply.timeout_s, lambda: _TOO_LATE, push):
            try:
                await self._finish(push, deadline_s)
                await asyncio.wait({digesting}, timeout=remaining_s(deadline_s, "compute the content digest"))
                if not digesting.done():
                    raise DeadlineError("the content digest was not computed in time; nothing changed")
                digesting.result()
                push.lifecycle.go("prepared")
            except BaseException as error:
                await self._clean_up(push, error)
                raise

    async def _clean_up(self, push: LivePush, error: BaseException) -> None:
        """Discards after an error what was prepared or replaced, and raises what the trainer gets instead of it, if
        anything."""
        # A worker that hangs answers a discard only when it continues; the trainer gets its answer on time.
        await self._end_preparation(1.0 if isinstance(error, DeadlineError) else _DISCARD_TIMEOUT_S)
        if not isinstance(error, Exception):
            return
        if push.served is not None:
            raise GenserveError(f"the new version is live, but the engine could not be resumed: {error}") from error
        if not isinstance(error, GenserveError):
            raise PushRolledBackError(f"the weights could not be applied; nothing changed: {error!r}") from error

    def check(self, options: ApplyOptions) -> None:
        """Raises PauseLeaseLostError."""
        if options.pause_lease_id:
            self._pauses.require(options.pause_lease_id)

    async def apply(self, push: LivePush) -> Applied:
        """Prepares, pauses, commits and resumes, all within the header's `apply.timeout_s`. What was replaced is freed
        after the answer, before anything else is applied.

        On any error the previous version is served and the engine is as it was: PauseLeaseLostError, DeadlineError,
        DrainingError, EngineDeadError, EngineSleepingError when a sleep of the weights came first, and
        PushRolledBackError for what went wrong in the engine. The exception is EngineTaintedError: the live weights are
        unknown then, and the engine is stopped. Undoing a late push takes time beyond the timeout. A commit of what was
        prepared leaves it prepared if the engine did not stop in time.

        `wait` is the time until nothing else was applied, and what that replaced was freed; and until other calls had
        ended their turn with the engine. `prepare` is what was left of it when every byte was there.
        """
        deadline_s = time.monotonic() + push.header.apply.timeout_s
        async with self._alone(push.header.apply.timeout_s, lambda: _TOO_LATE, push):
            options = push.header.apply
            previous_version = self._engine.weights.version
            self.check(options)  # reported now, not after a long preparation
            was_prepared, is_paused = push.was_prepared and self.holds(push), False
            try:
                if options.prepare_mode is PrepareMode.RUNNING:
                    preparation = await self._finish(push, deadline_s)
                async with self._pauses.hold(
                    options.pause_mode,
                    options.kv_policy,
                    timeout_s=remaining_s(deadline_s, "pause"),
                    lease_id=options.pause_lease_id,
                ) as hold:
                    is_paused = True
                    if options.prepare_mode is PrepareMode.PAUSED:
                        preparation = await self._finish(push, deadline_s)
                    with step("commit"):
                        commit_s = await self._commit(push, preparation.nonce, deadline_s)
            except BaseException as error:
                if was_prepared and not is_paused and isinstance(error, DeadlineError):
                    push.lifecycle.go("prepared")  # the engine did not stop in time: the commit can be repeated
                else:
                    await self._clean_up(push, error)
                raise
            push.wait_s += hold.wait_s
            steps = {
                **push.steps_before_prepare,
                "prepare": preparation.waited_s,
                "pause": hold.pause_s,
                "commit": commit_s,
                "resume": hold.resume_s,
            }
            applied = Applied.in_hold(previous_version, push.header.weight_version, steps, hold)
            if hold.interruption is not None:
                # Nothing waits for it. An interruption ends the one before, so few are followed at a time.
                task = asyncio.create_task(_follow(applied, hold, hold.interruption), name="aftermath of an update")
                self._following.add(task)
                task.add_done_callback(self._following.discard)
            # Neither requests nor the trainer wait while memory is freed. The workers free it after their next step,
            # which may compute every running request again.
            self._preparation = None
            self._freeing = asyncio.create_task(self._free(preparation.nonce, applied), name="freeing replaced weights")
            return applied

    @asynccontextmanager
    async def _alone(
        self, timeout_s: float, too_late: Callable[[], str], push: LivePush | None = None
    ) -> AsyncIterator[None]:
        """Nothing else is applied in the block, and nothing else than `push` is prepared. Raises as `check_weights` for
        a push."""
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._lock.acquire()
        except TimeoutError:
            raise DeadlineError(too_late()) from None
        try:
            if self._preparation is not None and self._preparation.push is not push:
                await self._end_preparation(min(timeout_s, _DISCARD_TIMEOUT_S))
            if push is not None:
                push.wait_s += time.monotonic() - began_s
                self._applied_id = push.push_id
                check_weights(self._board)
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

    async def _finish(self, push: LivePush, deadline_s: float) -> Preparation:
        """Prepares a push whose bytes are all there, unless its preparation has begun, and waits until it is done."""
        with step("prepare"):
            began_s, timeout_s = time.perf_counter(), remaining_s(deadline_s, "prepare")
            preparation = self._preparation
            if preparation is None:
                self._preparation = preparation = Preparation(self._engine, push, timeout_s)
                self._start(self._watch(preparation), f"watch over the preparation of push {push.push_id}")
            # The error of the engine's own limit says more.
            await asyncio.wait({preparation.task}, timeout=None if preparation.has_limit else timeout_s)
            if not preparation.task.done():
                raise DeadlineError(f"prepare did not finish within {timeout_s:g} s")
            preparation.task.result()
            preparation.waited_s += time.perf_counter() - began_s
            return preparation

    async def _commit(self, push: LivePush, nonce: str, deadline_s: float) -> float:
        """Exchanges the weights; seconds it took."""
        timeout_s = remaining_s(deadline_s, "commit")
        # If a push into a tainted engine fails, the engine stays tainted.
        if_failed = EngineCondition.TAINTED if self._board.engine_condition is EngineCondition.TAINTED else None
        if push.header.fleet is not None:
            push.header.fleet.check()
        push.lifecycle.go("applying")
        began_s = time.perf_counter()
        with self._board.applying(if_failed):
            healed = await uninterrupted(self._commit_or_heal(push, nonce, timeout_s))
        if healed is not None:
            raise PushRolledBackError(
                f"the commit failed, version {self._engine.weights.version} was applied again: {healed}"
            )
        return time.perf_counter() - began_s

    async def _commit_or_heal(self, push: LivePush, nonce: str, timeout_s: float) -> EngineTaintedError | None:
        """Commits. Returns the reason if the previous version had to be applied again, None if the push is served."""
        version = push.header.weight_version
        try:
            await self._engine.weights.commit(nonce, version, timeout_s)
        except (PushRolledBackError, DeadlineError, EngineDeadError):
            raise
        except EngineTaintedError as error:
            cause = error
        except Exception as error:
            # The engine promises to report the state that it left. An unknown error says nothing about it.
            cause = EngineTaintedError(f"the commit failed in an unknown way: {error!r}")
        else:
            # In one turn of the event loop: whoever hears of the version finds its bytes.
            self._resident.replace(push.serve())
            self._board.tell_applied()
            return None
        log.error("%s; applying version %d again", cause, self._engine.weights.version)
        await self.restore(cause)
        return cause

    async def restore(self, cause: EngineTaintedError) -> None:
        """Applies the resident version over weights that are unknown because of `cause`. Only while nothing is
        scheduled. Raises EngineTaintedError if it cannot."""
        nonce = uuid.uuid4().hex
        try:
            version = self._resident.require()
            async with version.as_arena() as arena:
                where = ArenaRef(arena.path, version.manifest.total_bytes)
                await self._engine.weights.prepare(nonce, where, version.manifest.tensors, _HEAL_TIMEOUT_S)
                await self._engine.weights.commit(nonce, version.weight_version, _HEAL_TIMEOUT_S)
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
            await uninterrupted(self._engine.weights.discard(nonce, timeout_s))
            return True
        except EngineDeadError:
            pass  # its memory is freed with the engine
        except Exception:
            log.exception("weights that are not needed any more could not be freed")
        return False


async def _follow(applied: Applied, hold: Hold, interruption: Interruption) -> None:
    """Writes to `applied` what the update costs those who generate, as far as it is known only after the answer."""
    try:
        await interruption.told()
        applied.recomputed_tokens = hold.recomputed_tokens
        if hold.paused_s is not None:  # otherwise others decide how long requests wait
            applied.longest_wait_s = await interruption.longest_wait_s()
    except EngineDeadError:
        pass  # nobody generates any more
    except Exception:
        log.exception("what an update costs those who generate is not known")
