"""Updates through vLLM's own transfer engines, made as safe as these allow.

Unlike a push, such an update writes over the live weights: generation is stopped from its start to its end. An update
that fails, or that nobody continues, is undone with the resident bytes of the previous version. After it is finished,
the daemon has no bytes of what it serves. Owns the one open update and its time to live.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from genserve.aio import Change
from genserve.control.conditions import EngineCondition, check_untainted, check_weights
from genserve.control.leases import check_ttl
from genserve.control.pause import Hold, PauseController
from genserve.control.state import StateBoard
from genserve.control.turn import remaining_s, uninterrupted
from genserve.engine.protocol import Engine
from genserve.errors import (
    DeadlineError,
    EngineDeadError,
    EngineTaintedError,
    GenserveError,
    PushRolledBackError,
    UnsupportedError,
    UpdateNotFoundError,
)
from genserve.weights.apply import PushApplier
from genserve.weights.push.types import Applied, HoldOptions, PushHeader, PushKind
from genserve.weights.push_admission import check_version, check_version_number
from genserve.weights.registry import PushRegistry
from genserve.weights.resident import ResidentStore
from genserve.wire.bounds import check_text

DEFAULT_START_TIMEOUT_S = 60.0
DEFAULT_TTL_S = 60.0
_ABANDON_TIMEOUT_S = 30.0
_ABSENCE = "are not here, because they came through vLLM's own weight transfer"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpdateOptions(HoldOptions):
    """How to begin. An empty `update_id` is minted; `ttl_s`: seconds that the next call may take to come; `timeout_s`:
    seconds to pause and begin."""

    update_id: str = ""
    ttl_s: float = DEFAULT_TTL_S
    timeout_s: float = DEFAULT_START_TIMEOUT_S


@dataclass(slots=True)
class OpenUpdate:
    """An update that has begun. `due_s`: when its time to live ends, on the clock; `receive_s`: seconds that its
    tensors took so far; `is_untouched`: nothing can have been received yet; `leaving` lets generation go on, and pushes
    in: leave it with the error that ended the update."""

    update_id: str
    ttl_s: float
    due_s: float
    hold: Hold
    leaving: AsyncExitStack
    receive_s: float = 0.0
    is_untouched: bool = True


class TransferUpdates:
    """vLLM's four calls.

    One call is carried out at a time, and to its end even if its caller is gone, because a worker that receives cannot
    be interrupted. `clock` gives monotonic seconds. All raise UnsupportedError without --weight-transfer-config,
    EngineDeadError, and DeadlineError.
    """

    def __init__(
        self,
        engine: Engine,
        pauses: PauseController,
        board: StateBoard,
        pushes: PushRegistry,
        applier: PushApplier,
        resident: ResidentStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._pauses = pauses
        self._board = board
        self._pushes = pushes
        self._applier = applier
        self._resident = resident
        self._clock = clock
        self._calls = asyncio.Lock()
        self._open: OpenUpdate | None = None
        self._finished: tuple[str, Applied] | None = None
        self._changed = Change()

    async def init(self, info: str, timeout_s: float) -> str:
        """Makes every rank connect to the trainer, and returns the backend's name. Raises PushRolledBackError with
        vLLM's message, and ApplyInProgressError while a push or an update is in progress."""
        backend = self._require_backend()
        self._pushes.check_free()  # reported at once, not when the running call has ended

        async def init() -> None:
            await self._pushes.reserve("init")
            try:
                async with self._pauses.undisturbed(timeout_s, "a weight update"):
                    await self._engine.transfer.init(info, timeout_s)
            except (DeadlineError, EngineDeadError):
                raise
            except GenserveError as error:
                raise PushRolledBackError(f"{error.message}; nothing changed") from error
            finally:
                self._pushes.release()

        async with self._calls:
            await uninterrupted(init())
        return backend

    async def start(self, options: UpdateOptions) -> OpenUpdate:
        """Pauses and begins. A repeat for the open update returns that one.

        Raises as `PauseController.hold`; ApplyInProgressError while a push or another update is in progress;
        EngineTaintedError, because what vLLM transfers is not verified and so cannot make the engine consistent;
        InvalidFieldError ("update_id", "ttl").
        """
        self._require_backend()
        check_text(options.update_id, "update_id")
        check_ttl(options.ttl_s)
        if self._open is None or self._open.update_id != options.update_id:
            self._pushes.check_free()
        async with self._calls:
            if self._open is not None and self._open.update_id == options.update_id:
                self._touch(self._open)
                return self._open
            check_untainted(self._board.engine_condition)
            self._check_nothing_lost()
            return await uninterrupted(self._start(options))

    def _check_nothing_lost(self) -> None:
        """Raises EngineTaintedError, with instructions, while a sleep has dropped the weights: vLLM does not tell
        whether an update brings all of them."""
        if not self._board.asleep.weights_lost:
            return
        way = "wake up the rest, which restores the served version, or push a complete one (PushWeights)"
        if self._resident.served is None:
            way = "push a complete version (PushWeights): the bytes of the served one are not here to be restored"
        raise EngineTaintedError(
            f"the sleep of level 2 has dropped the weights, and vLLM's transfer may bring some of them only: {way}, "
            "and start the update then; a trainer that sends through vLLM's transfer alone sleeps with level 1"
        )

    async def _start(self, options: UpdateOptions) -> OpenUpdate:
        deadline_s = time.monotonic() + options.timeout_s
        update_id = options.update_id or uuid.uuid4().hex
        async with AsyncExitStack() as stack:
            await self._pushes.reserve(update_id)
            stack.callback(self._pushes.release)
            # Ends what is prepared early of a push that may go on afterwards: it belongs to the live model of now.
            async with self._applier.between_pushes(options.timeout_s):
                pass
            hold = await stack.enter_async_context(
                self._pauses.hold(
                    options.pause_mode,
                    options.kv_policy,
                    timeout_s=remaining_s(deadline_s, "pause"),
                    lease_id=options.pause_lease_id,
                )
            )
            # Another caller may have left inconsistent weights meanwhile.
            check_untainted(self._board.engine_condition)
            self._check_nothing_lost()
            left_s = remaining_s(deadline_s, "begin")
            stack.enter_context(self._board.applying(if_failed=EngineCondition.TAINTED))
            stack.callback(self._forget_open)
            update = self._open = OpenUpdate(update_id, options.ttl_s, 0.0, hold, stack.pop_all())
        await self._carry_out(update, self._engine.transfer.start(left_s))
        return update

    async def update(self, update_id: str, info: str, timeout_s: float) -> None:
        """Makes every rank receive tensors; "" is the open update.

        Raises UpdateNotFoundError. Any other error ends the update: PushRolledBackError or DeadlineError if it was
        undone, EngineTaintedError if it could not be.
        """
        self._require_backend()
        async with self._calls:
            update = self._require(update_id)
            update.is_untouched = False
            step = self._engine.transfer.update(info, timeout_s)
            update.receive_s += await uninterrupted(self._carry_out(update, step))

    async def finish(self, update_id: str, version: int | None, timeout_s: float, *, force: bool = False) -> Applied:
        """Serves what was received as `version`; None = the previous one plus 1. A repeat returns the same.

        Raises as `update`, and PushRolledBackError if nothing was received. InvalidFieldError and VersionNotNewerError
        leave the update open.
        """
        self._require_backend()
        async with self._calls:
            if self._open is None and self._finished is not None and self._finished[0] == update_id:
                return self._finished[1]
            update, previous_version = self._require(update_id), self._engine.weights.version
            version = previous_version + 1 if version is None else version
            check_version_number(version, "weight_version")
            check_version(PushHeader("", version, force=force), previous_version)
            return await uninterrupted(self._finish(update, version, previous_version, timeout_s))

    async def _finish(self, update: OpenUpdate, version: int, previous_version: int, timeout_s: float) -> Applied:
        if update.is_untouched:
            await self._undo(update, "nothing was received")
            raise PushRolledBackError(
                f"update {update.update_id!r} received nothing: call UpdateWeights before FinishWeightUpdate; it was "
                f"undone, version {previous_version} is served"
            )
        commit_s = await self._carry_out(update, self._engine.transfer.finish(version, timeout_s))
        self._resident.forget(_ABSENCE)
        await update.leaving.aclose()
        hold = update.hold
        steps = {
            "wait": hold.wait_s,
            "pause": hold.pause_s,
            "receive": update.receive_s,
            "commit": commit_s,
            "resume": hold.resume_s,
        }
        applied = Applied.in_hold(previous_version, version, steps, hold)
        self._pushes.measures.applied(PushKind.TRANSFER, applied)
        self._finished = (update.update_id, applied)
        return applied

    async def run(self) -> None:
        """Undoes an update whose time to live has ended. Never returns."""
        while True:
            update = self._open
            try:
                async with asyncio.timeout(None if update is None else max(0.0, update.due_s - self._clock())):
                    await self._changed.wait()
            except TimeoutError:
                async with self._calls:
                    if update is self._open and update is not None and self._clock() >= update.due_s:
                        cause = f"nobody continued update {update.update_id!r} for {update.ttl_s:g} s"
                        await uninterrupted(self._undo_and_log(update, cause))

    async def close(self) -> None:
        """Undoes the open update, if any, after its running call has ended. May be cancelled before."""
        async with self._calls:
            if self._open is not None:
                await self._undo_and_log(self._open, "the daemon is shutting down")

    def _require_backend(self) -> str:
        backend = self._engine.info.weight_transfer
        if not backend:
            raise UnsupportedError("the daemon was started without --weight-transfer-config")
        return backend

    def _require(self, update_id: str) -> OpenUpdate:
        if self._open is not None and update_id in ("", self._open.update_id):
            return self._open
        check_weights(self._board)
        raise UpdateNotFoundError(
            f"no update {update_id!r} is open; it may have expired, and was undone then",
            metadata={"update_id": update_id},
        )

    async def _carry_out(self, update: OpenUpdate, step: Coroutine[Any, Any, None]) -> float:
        """Carries out one call to the engine, and returns its seconds. A failure ends the update."""
        began_s = time.perf_counter()
        try:
            await step
        except EngineDeadError:
            async with update.leaving:
                raise
        except Exception as error:
            await self._undo(update, str(error))
            message = f"the update was undone; version {self._engine.weights.version} is served: {error}"
            raise (DeadlineError if isinstance(error, DeadlineError) else PushRolledBackError)(message) from error
        self._touch(update)
        return time.perf_counter() - began_s

    async def _undo(self, update: OpenUpdate, cause: str) -> None:
        """Serves the previous version again. Raises EngineTaintedError if it cannot."""
        async with update.leaving:
            try:
                await self._engine.transfer.abandon(_ABANDON_TIMEOUT_S)
                if not update.is_untouched:
                    await self._applier.restore(EngineTaintedError(f"a weight update failed ({cause})"))
            except (EngineDeadError, EngineTaintedError) as error:
                self._pushes.measures.failed(PushKind.TRANSFER, error)
                raise
            except Exception as error:
                message = f"a weight update failed ({cause}) and could not be undone ({error})"
                self._pushes.measures.failed(PushKind.TRANSFER, EngineTaintedError(message))
                raise EngineTaintedError(message) from error
            self._pushes.measures.failed(PushKind.TRANSFER, PushRolledBackError(cause))

    async def _undo_and_log(self, update: OpenUpdate, cause: str) -> None:
        try:
            await self._undo(update, cause)
        except GenserveError as error:
            log.error("%s", error)
        else:
            log.warning("%s: it was undone, version %d is served", cause, self._engine.weights.version)

    def _forget_open(self) -> None:
        self._open = None

    def _touch(self, update: OpenUpdate) -> None:
        update.due_s = self._clock() + update.ttl_s
        self._changed.notify()
