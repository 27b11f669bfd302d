"""What happens when every byte of a push has arrived: it is checked, then staged, prepared or applied, and its outcome
is reported."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from genserve.control.conditions import check_weights
from genserve.control.state import StateBoard
from genserve.engine.protocol import Engine
from genserve.errors import PushConflictError
from genserve.observe.trace import step
from genserve.weights.apply import PushApplier
from genserve.weights.lora.loader import LoraLoader
from genserve.weights.push.lifecycle import State
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.live_pushes import LivePushes
from genserve.weights.push.outcomes import Outcomes
from genserve.weights.push.types import Applied, PushAction, PushHeader, PushOutcome
from genserve.weights.push_admission import check_version, mismatch
from genserve.weights.resident import ResidentStore


class Completion:
    """Carries out pushes: one of weights at a time, and adapters beside it. Each has a task of its own, because clients
    come and go meanwhile. `tied` names tensors that equal another one."""

    def __init__(
        self,
        engine: Engine,
        board: StateBoard,
        applier: PushApplier,
        loras: LoraLoader,
        resident: ResidentStore,
        outcomes: Outcomes,
        pushes: LivePushes,
        tied: Mapping[str, str],
    ) -> None:
        self._engine = engine
        self._board = board
        self._applier = applier
        self._loras = loras
        self._resident = resident
        self._outcomes = outcomes
        self._pushes = pushes
        self._tied = tied

    def begin_early(self, push: LivePush) -> None:
        """Lets workers prepare a version while its bytes arrive, if it will be prepared or applied as it is sent; and
        hashes them, if the digest of its contents will be needed."""
        if push.header.action is PushAction.PREPARE or push.header.content_digest:
            push.begin_digest()
        if push.header.replaces_weights and not push.staging.manifest.partial:
            self._applier.begin_early(push)

    def start(self, push: LivePush) -> None:
        """Starts. When the daemon is done with the push, it is applied, or waits for a commit, a retry or its end."""
        push.lifecycle.go("checking")
        push.task = asyncio.create_task(self._carry_out(push), name=f"push {push.push_id}")

    async def _carry_out(self, push: LivePush) -> None:
        with step("push"):
            try:
                with push.checked():
                    await self._stage(push)
                if push.header.action is PushAction.PREPARE:
                    await self._prepare(push)
                self._settle(push, await self._apply(push) if push.header.action is PushAction.APPLY else None)
            except Exception as error:
                self._settle(push, error=error)
            finally:
                if push.lifecycle.is_busy:  # this task was cancelled
                    push.break_off()
                push.touch()
                if push.lifecycle.state is State.APPLIED:
                    self._pushes.forget(push)
                self._pushes.changed.notify()
                # An error's traceback holds this frame, and this frame the error: the memory of a push would wait for
                # the garbage collector.
                del push

    async def _stage(self, push: LivePush) -> None:
        """Compares tied tensors, once, and the contents with what a header has said of them, or what was applied under
        the id. Raises ManifestMismatchError for tied tensors that differ, ChecksumMismatchError, PushConflictError."""
        if not push.is_checked:
            if issues := await asyncio.to_thread(push.staging.tied_issues, self._tied):
                raise mismatch(issues)
            push.is_checked = True
        if named := push.header.content_digest:
            await push.compute_digest()
            push.check_digest(named)
        if push.header.lora is not None:
            await self._compare_applied(push)
        push.stage()

    async def _compare_applied(self, push: LivePush) -> None:
        """An adapter's bytes are not kept, but what was applied under its id has a digest. Raises PushConflictError for
        other contents: they would have the version of the first ones."""
        await push.compute_digest()
        applied = self._outcomes.applied.get(push.push_id)
        if applied is not None and applied.outcome.push.content_digest != push.content_digest:
            raise PushConflictError(
                f"push {push.push_id!r} was applied with other tensors: push these under another push_id",
                metadata={"push_id": push.push_id},
            )

    async def _prepare(self, push: LivePush) -> None:
        """Has workers prepare what is staged, for a later commit. Raises as `PushApplier.prepare`, and StagingFullError
        while another push is prepared."""
        self.check(push.header)
        self._pushes.check_place(push.push_id)
        push.lifecycle.go("preparing")
        with push.attempt.answered_on_time(push.header.apply.timeout_s):
            await self._pushes.make_place(push.push_id)
            if push.staging.manifest.partial:
                await self._complete(push)
            digesting = asyncio.create_task(push.compute_digest(), name=f"content digest of push {push.push_id}")
            digesting.add_done_callback(lambda done: done.cancelled() or done.exception())
            await self._applier.prepare(push, digesting)

    async def _apply(self, push: LivePush) -> Applied:
        """Makes what is staged live. Raises as `PushApplier.apply`."""
        self.check(push.header)
        push.lifecycle.go("preparing")
        with push.attempt.answered_on_time(push.header.apply.timeout_s):
            if push.header.lora is not None:
                return await self._loras.apply(push, push.header.lora, lambda: self.check_version(push.header))
            if push.staging.manifest.partial:
                await self._complete(push)
            return await self._applier.apply(push)

    async def _complete(self, push: LivePush) -> None:
        """Adds what a partial push lacks, as it is served now; what is prepared was completed from that already."""
        if not self._applier.holds(push):
            with push.checked():
                await push.staging.complete(self._resident.require(), self._tied)

    def check(self, header: PushHeader) -> None:
        """Repeats checks of a header, because their results may have changed while the bytes arrived."""
        for push in self._pushes.values():
            is_weights = header.lora is None and push.header.lora is None
            if is_weights and push.lifecycle.state in (State.PREPARING, State.APPLYING):
                raise push.in_progress()
        check_weights(self._board)
        self.check_version(header)

    def check_version(self, header: PushHeader) -> int:
        """Returns the version under which the push is to be applied: a repeat that names none has that of the first
        time; 0 = the next one of an adapter. Raises VersionNotNewerError or WeightVersionMismatchError unless it may
        follow what it replaces. A repeat of the push that brought the loaded adapter replaces no other."""
        if header.lora is None:
            check_version(header, self._engine.weights.version)
            return header.weight_version
        if not header.weight_version and (applied := self._outcomes.applied.get(header.push_id)) is not None:
            header = replace(header, weight_version=applied.outcome.push.weight_version)
        if not self.has_loaded(header):
            check_version(header, self._loras.version(header.lora_name))
        return header.weight_version

    def has_loaded(self, header: PushHeader) -> bool:
        """Whether the adapter that is loaded is what this push brought when it was applied, under the version that it
        names, if any."""
        if header.lora is None or self._outcomes.applied.get(header.push_id) is None:
            return False
        loaded = self._loras.loaded(header.lora_name)
        if loaded is None or loaded.push_id != header.push_id:
            return False
        return header.weight_version in (0, loaded.version)

    def check_commit(self, header: PushHeader) -> None:
        """As `check`, and what applying it as the header says would raise before anything is tried."""
        self.check(header)
        self._applier.check(header.apply)

    async def close(self) -> None:
        """Returns when workers hold nothing of any push. Call it when all pushes are gone."""
        await self._applier.close()

    def _settle(self, push: LivePush, applied: Applied | None = None, error: Exception | None = None) -> None:
        """Tells what came of it, to the streams and to those who ask later. A version that is live is applied, also
        when the engine could not be resumed."""
        record, measures = None, self._outcomes.measures
        if applied is not None or push.served is not None:
            push.lifecycle.go("applied")
            outcome = PushOutcome(push.report(), applied)
            loaded = set() if push.header.lora is None else self._loras.push_ids()
            record = self._outcomes.add_applied(push, outcome, push.served, loaded)
            push.compare_served = partial(self._outcomes.compare, record)
        elif error is not None:
            push.fail(error)
        if applied is not None:
            measures.applied(push.header.kind, applied)
        elif error is not None:
            measures.failed(push.header.kind, error)
        else:
            measures.ended(push.header.kind, push.report().state.value)
        answer = PushOutcome(push.report()) if record is None else record.answer
        push.attempt.answer(answer if error is None else error)
