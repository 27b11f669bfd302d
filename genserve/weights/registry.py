"""Who may open a push, and who may have it applied or discarded.

Owns the rules between pushes. One push goes through these modules: `push_admission` checks its header, and the memory
for it; `push.stream` takes its chunks, and `push.staging` keeps them; `completion` carries it out when all are there,
with `apply`; `push.outcomes` remembers what came of it. `push.live_push` is the push, `push.lifecycle` its states, and
`push.live_pushes` holds those whose bytes are here.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from genserve.control.conditions import check_weights
from genserve.control.membership import FleetCommit
from genserve.control.state import StateBoard
from genserve.control.turn import uninterrupted
from genserve.engine.protocol import Engine
from genserve.errors import ApplyInProgressError, DrainingError, GenserveError, PushConflictError, StagingFullError
from genserve.memory.arena import allocate_arena
from genserve.observe.log_lines import PUSH_ID
from genserve.tensors.manifest import Manifest, PushIssue, completed
from genserve.weights.apply import PushApplier
from genserve.weights.checkpoint.index import CheckpointIndex
from genserve.weights.completion import Completion
from genserve.weights.lora.loader import LoraLoader
from genserve.weights.push.lifecycle import State
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.live_pushes import LivePushes, Opening, Openings, not_found
from genserve.weights.push.outcomes import AppliedPush, Outcomes
from genserve.weights.push.staging import Staging, check_chunk
from genserve.weights.push.stream import AnsweredStream, LiveStream, PushStream
from genserve.weights.push.types import ApplyOptions, PushAction, PushHeader, PushOutcome, PushReport
from genserve.weights.push_admission import (
    check_header,
    examine,
    mismatch,
    naming_wide_tensors,
    plan_evictions,
)
from genserve.weights.resident import ResidentStore

# How long a new attempt waits for the streams of another one, whose client may just have gone.
LEAVE_TIMEOUT_S = 2.0
# How long a stream with only the digest waits for the one with the manifest, because they race.
_FIRST_STREAM_TIMEOUT_S = 30.0


class PushRegistry:
    """Every push of the daemon. Without a `checkpoint` manifests are only checked by themselves. `max_staging_bytes`
    bounds all pushes and the resident bytes together. `clock` gives monotonic seconds."""

    def __init__(
        self,
        checkpoint: CheckpointIndex | None,
        engine: Engine,
        applier: PushApplier,
        loras: LoraLoader,
        board: StateBoard,
        resident: ResidentStore,
        max_staging_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoint = checkpoint
        self._loras = loras
        self._board = board
        self._resident = resident
        self._max_staging_bytes = max_staging_bytes
        self._clock = clock
        self._pushes = LivePushes(clock, board.changed)  # who watches the status sees pushes
        self._tied: Mapping[str, str] = checkpoint.tied if checkpoint is not None else {}
        self._outcomes = Outcomes(resident, clock)
        self._completion = Completion(engine, board, applier, loras, resident, self._outcomes, self._pushes, self._tied)
        self.live, self.measures = self._pushes, self._outcomes.measures
        """What is here, and numbers of what became of all."""
        self.openings = Openings()
        self._opening = asyncio.Lock()
        self._reserved_for = ""
        self._closed = False

    @property
    def room_bytes(self) -> int:
        """What `max_staging_bytes` leaves beside the pushes and the resident bytes."""
        taken_bytes = sum(push.size_bytes for push in self._pushes.values()) + self._resident.held_bytes
        return self._max_staging_bytes - taken_bytes

    async def open(self, header: PushHeader) -> PushStream:
        """Opens a push, or joins the one with this id: after a break, or as one of several streams.

        Nothing is allocated or freed unless everything is valid. Raises InvalidFieldError, PushConflictError,
        DrainingError, EngineDeadError, EngineSleepingError, VersionNotNewerError, WeightVersionMismatchError,
        ManifestMismatchError, ApplyInProgressError (its metadata has the `push_id` in progress), StagingFullError, and
        PushNotFoundError for a digest without a push.
        """
        check_header(header)
        header = replace(header, push_id=header.push_id or uuid.uuid4().hex)
        with self.openings.begun(header.push_id) as opening:
            lora = self._loras.check(header.lora) if header.lora is not None else None
            if header.manifest is None:
                await self._wait_for_first_stream(header)
            # In a thread: an honest manifest of 100,000 tensors would delay every token stream.
            digest, issues = await asyncio.to_thread(
                examine, header.manifest, header.manifest_digest, self._checkpoint, lora=lora
            )
            PUSH_ID.set(header.push_id)
            leave_s = (loop := asyncio.get_running_loop()).time() + LEAVE_TIMEOUT_S
            while True:
                # One at a time: the second of two equal headers must find the push of the first.
                async with self._opening:
                    waits = self._waits_for(header, can_leave=loop.time() < leave_s)
                    if not waits:
                        return await self._open_whole(header, opening, digest, issues)
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(None if waits == "check" else leave_s):
                        await self._pushes.changed.wait()

    def _waits_for(self, header: PushHeader, *, can_leave: bool) -> str:
        """What must end before a header can be answered: the "check" of the bytes, or another "attempt" whose streams
        may just be ending because their client is gone. "" = nothing."""
        push = self._pushes.get(header.push_id)
        if push is None or header.action is PushAction.VALIDATE:
            return ""
        if push.lifecycle.state is State.CHECKING:
            return "check"
        return "attempt" if can_leave and push.meets_other(header) else ""

    async def _open_whole(
        self, header: PushHeader, opening: Opening, digest: str, issues: list[PushIssue]
    ) -> PushStream:
        """Opens to its end even if the client is gone: nobody else may allocate meanwhile."""
        opened = asyncio.ensure_future(self._open(header, opening, digest, issues))
        try:
            return await uninterrupted(opened)
        except asyncio.CancelledError:
            if not opened.cancelled() and opened.exception() is None:
                opened.result().detach()
            raise
        finally:
            del opened  # see genserve.aio

    async def _open(self, header: PushHeader, opening: Opening, digest: str, issues: list[PushIssue]) -> PushStream:
        applied = self._outcomes.applied.get(header.push_id)
        if applied is not None:
            applied.identity.check(header, digest)
            if self._outcomes.repeated(header) is not None:
                return self._repeat(applied, header.attempt)
        check_weights(self._board)
        self.check_open()
        if (refused := self._outcomes.refusal(header)) is not None:
            raise refused.error.again()
        if header.action is PushAction.PREPARE:
            self._pushes.check_place(header.push_id)
        push = self._pushes.get(header.push_id)
        if push is not None:
            push.identity.check(header, digest)
            if header.action is not PushAction.VALIDATE:
                return self._join(push, header)
        self._completion.check_version(header)
        if issues:
            raise mismatch(issues)
        if header.manifest is None:
            raise not_found(header.push_id)
        size_bytes = header.manifest.total_bytes
        if header.manifest.partial:
            size_bytes = completed(header.manifest, self._resident.require().manifest, self._tied).total_bytes
        if header.action is PushAction.VALIDATE:
            return AnsweredStream(PushOutcome(PushReport.valid(header, digest)))
        push = await self._begin(header, opening, header.manifest, digest, size_bytes)
        return LiveStream(push, push.attempt, self._advance, self._refuse)

    async def _begin(
        self, header: PushHeader, opening: Opening, manifest: Manifest, digest: str, size_bytes: int
    ) -> LivePush:
        self.check_free()
        opening.check()
        try:
            evicted = plan_evictions(
                size_bytes,
                self._pushes.values(),
                self._max_staging_bytes,
                self._resident,
                partial=manifest.partial,
                lora=header.lora is not None,
                replaces_weights=header.replaces_weights,
            )
        except StagingFullError as error:
            raise naming_wide_tensors(error, manifest, self._checkpoint) from error.__cause__
        await asyncio.gather(*(self._pushes.drop(push, push.truncation()) for push in evicted.leftovers))
        evicted.clear(self._resident)
        # An adapter does not use the arena that waits for the next version.
        allocate = allocate_arena if header.lora is not None else self._resident.arena_for
        arena = await allocate(manifest.total_bytes)
        try:
            self.check_open()
            opening.check()
        except GenserveError:
            await asyncio.to_thread(arena.close)
            raise
        staging = Staging(header.push_id, manifest, arena)
        push = LivePush(header, digest, staging, size_bytes, self._clock, self._pushes.changed)
        push.open_s = time.perf_counter() - opening.began_s
        self._pushes.add(push)
        self._completion.begin_early(push)
        return push

    def _repeat(self, applied: AppliedPush, attempt: str) -> PushStream:
        """A stream of a push that is already applied: its bytes are compared, as long as they are served."""

        def compare(offset: int, data: bytes | memoryview, crc32c: int | None) -> None:
            check_chunk(offset, data, crc32c, applied.outcome.push.total_bytes)
            self._outcomes.compare(applied, attempt, offset, data)

        return AnsweredStream(applied.answer, compare)

    def _join(self, push: LivePush, header: PushHeader) -> PushStream:
        self.check_free()
        if header.yields and push.meets_other(header):
            raise push.in_progress()
        try:
            attempt = push.join(header)
            if attempt.num_opened == 0:
                self._completion.begin_early(push)
            return LiveStream(push, attempt, self._advance, self._refuse)
        except PushConflictError as error:
            self._refuse(push, error)
            raise

    async def _wait_for_first_stream(self, header: PushHeader) -> None:
        try:
            async with asyncio.timeout(min(_FIRST_STREAM_TIMEOUT_S, header.staging_ttl_s)):
                while header.push_id not in self._pushes and not self._outcomes.answers(header):
                    await self._pushes.changed.wait()
        except TimeoutError:
            raise not_found(header.push_id) from None

    def _refuse(self, push: LivePush, error: PushConflictError) -> None:
        """Ends a push for all streams, because two of its attempts or streams conflict."""
        self._outcomes.add_refused(push, error)
        self._pushes.drop(push, error)

    def _advance(self, push: LivePush) -> None:
        """A stream of the push has ended or was cut off: carries out the push, or reports missing bytes."""
        if push.lifecycle.state is State.RECEIVING and not push.attempt.result.done() and not self._closed:
            if push.attempt.has_ended and push.staging.has_every_byte:
                self._completion.start(push)
            elif push.attempt.is_over:
                self.measures.failed(push.header.kind, push.truncation())
                push.truncate()
        self._pushes.changed.notify()

    async def reserve(self, update_id: str) -> None:
        """Excludes pushes until `release`; staged ones stay staged. Raises ApplyInProgressError, and as `open`."""
        async with self._opening:
            check_weights(self._board)
            self.check_free()
            for push in self._pushes.values():
                if push.is_held:
                    raise push.in_progress()
            self._reserved_for = update_id

    def release(self) -> None:
        """Allows pushes again."""
        self._reserved_for = ""

    def check_open(self) -> None:
        """Raises DrainingError after `close`."""
        if self._closed:
            raise DrainingError("the daemon is shutting down")

    def check_free(self) -> None:
        """Raises ApplyInProgressError while an update excludes pushes."""
        if self._reserved_for:
            raise ApplyInProgressError(
                f"weight update {self._reserved_for!r} is in progress",
                metadata={"update_id": self._reserved_for},
                retry_after_s=1.0,
            )

    def report(self, push_id: str, *, as_answered: bool = False) -> PushOutcome:
        """The progress of a push; `as_answered`: of one that was applied, without what became known after the answer.
        Raises PushNotFoundError if it was never opened or has expired."""
        applied, refused = self._outcomes.applied.get(push_id), self._outcomes.refused(push_id)
        if applied is not None:
            return applied.answer if as_answered else applied.outcome
        if push_id not in self._pushes and refused is not None:
            return refused.outcome
        return PushOutcome(self._pushes.find(push_id).report())

    async def commit(
        self,
        push_id: str,
        apply: ApplyOptions,
        expected_version: int | None = None,
        fleet: FleetCommit | None = None,
    ) -> PushOutcome:
        """Applies a push whose bytes have all arrived; of a prepared one only the exchange is left. What was sent again
        for an adapter that is still loaded is freed. `expected_version` None = as its header says. `fleet` is told
        in the moment in which its version is live, also for one that is live already. Raises PushNotFoundError,
        PushTruncatedError, ApplyInProgressError while it is being sent, and as `open`, `PushStream.finish` and
        `FleetCommit.check`."""
        PUSH_ID.set(push_id)
        while push_id in self._pushes and self._pushes[push_id].is_settling:
            await self._pushes.changed.wait()
        applied, again = self._outcomes.applied.get(push_id), self._pushes.get(push_id)
        if applied is not None and (again is None or self._completion.has_loaded(again.header)):
            if again is not None and again.lifecycle.can_commit:
                await self._pushes.drop(again, again.not_found())
            if fleet is not None and self._resident.push_id == push_id:
                fleet.served()
            return applied.answer
        if push_id not in self._pushes and (refused := self._outcomes.refused(push_id)) is not None:
            raise refused.error.again()
        push = self._pushes.find(push_id)
        check_weights(self._board)
        if push.lifecycle.is_busy:
            return await asyncio.shield(push.attempt.result)
        if not push.lifecycle.can_commit:
            raise push.in_progress() if push.attempt.is_live else push.truncation()
        self.check_free()
        header = replace(push.stream_header, action=PushAction.APPLY, apply=apply, num_streams=1, fleet=fleet)
        if expected_version is not None:
            header = replace(header, expected_version=expected_version)
        self._completion.check_commit(header)  # a commit that is refused leaves the push prepared
        attempt = push.begin_commit(header)
        self._completion.start(push)
        return await asyncio.shield(attempt.result)

    def discard(self, push_id: str, *, force: bool = False) -> PushOutcome:
        """Frees the bytes of a push; with `force` even while it is being sent, and whoever is about to open or fetch it
        gets PushNotFoundError. Raises PushNotFoundError, and ApplyInProgressError while it is in progress."""
        refused, push = self._outcomes.forget_refused(push_id), self._pushes.get(push_id)
        if push is not None and (push.lifecycle.is_busy or (push.is_held and not force)):
            raise push.in_progress()
        if force:
            self.openings.discard(push_id)
        if push is None:
            if refused is None:
                raise not_found(push_id)
            return refused
        outcome = PushOutcome(push.report())
        self._pushes.drop(push, push.not_found())
        return outcome

    async def close(self) -> None:
        """Refuses further pushes, waits for those that are carried out, and frees the bytes of all others, and what
        workers have prepared of them."""
        self._closed = True
        await self._pushes.close()
        await self._completion.close()
