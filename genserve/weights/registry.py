"""The pushes that are under way or done: who may open one, and what came of each.

Owns the rules and the time to live. Whether a header is good is `admission`, what lies where is `session`, who sends is
`stream`, and applying is `update`.
"""

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace

from genserve.control.admission import check_control
from genserve.control.state import StateBoard
from genserve.engine.base import Engine
from genserve.errors import (
    ApplyInProgressError,
    DrainingError,
    GenserveError,
    PushNotFoundError,
    PushTruncatedError,
)
from genserve.weights.admission import (
    check_apply,
    check_header,
    check_num_tensors,
    check_same,
    check_version,
    examine,
    refuse_issues,
)
from genserve.weights.arena import allocate_arena
from genserve.weights.checkpoint import CheckpointIndex
from genserve.weights.lora import LoraLoader
from genserve.weights.manifest import PushIssue, completed
from genserve.weights.push import ApplyOptions, PushAction, PushHeader, PushOutcome, PushReport, PushState
from genserve.weights.resident import ResidentStore
from genserve.weights.room import make_room
from genserve.weights.session import PushSession
from genserve.weights.stream import LivePush, PushStream, Round
from genserve.weights.update import WeightUpdater

_NUM_REMEMBERED = 64
# How long a stream that brings the digest alone waits for the one that brings the manifest, as they race.
_FIRST_STREAM_TIMEOUT_S = 30.0


class PushRegistry:
    """Every push of the daemon. Without a `checkpoint` manifests are checked by themselves alone; `max_staging_bytes`
    bounds all pushes and what is resident together; `clock` gives monotonic seconds."""

    def __init__(
        self,
        checkpoint: CheckpointIndex | None,
        engine: Engine,
        updater: WeightUpdater,
        loras: LoraLoader,
        board: StateBoard,
        resident: ResidentStore,
        max_staging_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpoint = checkpoint
        self._engine = engine
        self._updater = updater
        self._loras = loras
        self._board = board
        self._resident = resident
        self._max_staging_bytes = max_staging_bytes
        self._clock = clock
        self._pushes: dict[str, LivePush] = {}
        self._applied: OrderedDict[str, PushOutcome] = OrderedDict()
        self._opening = asyncio.Lock()
        self._reserved_for = ""
        self._changed = asyncio.Event()
        self._closed = False

    def check_num_tensors(self, num_tensors: int, *, lora: bool = False) -> None:
        """Raises ManifestMismatchError for more tensors than can be right. Ask before converting a manifest: that alone
        would take seconds for a hostile one."""
        check_num_tensors(num_tensors, self._checkpoint, lora=lora)

    async def open(self, header: PushHeader) -> PushStream:
        """Opens a push, or joins the one that its id names: after a break, or as one of several streams.

        Nothing is allocated unless everything is right. Raises InvalidFieldError, PushConflictError, DrainingError,
        EngineDeadError, EngineSleepingError, VersionNotNewerError, WeightVersionMismatchError, ManifestMismatchError,
        ApplyInProgressError (its metadata has the `push_id` that is under way), StagingFullError, and PushNotFoundError
        for a digest without a push.
        """
        check_header(header)
        if header.lora is not None:
            self._loras.check(header.lora)
        if header.manifest is not None:
            self.check_num_tensors(len(header.manifest.tensors), lora=header.lora is not None)
        else:
            await self._wait_for_first_stream(header)
        # In a thread: an honest manifest of a hundred thousand tensors would hold up every token stream.
        digest, issues = await asyncio.to_thread(
            examine, header.manifest, header.manifest_digest, self._checkpoint, lora=header.lora is not None
        )
        # One at a time: the second of two equal headers has to find the push of the first.
        async with self._opening:
            return await self._open(replace(header, push_id=header.push_id or uuid.uuid4().hex), digest, issues)

    async def _open(self, header: PushHeader, digest: str, issues: list[PushIssue]) -> PushStream:
        applied = self._applied.get(header.push_id)
        if applied is not None:
            check_same(header, digest, applied.push)
            return PushStream.of_outcome(applied)
        check_control(self._board.phase)
        if self._closed:
            raise DrainingError("the daemon is shutting down")
        push = self._pushes.get(header.push_id)
        if push is not None:
            check_same(header, digest, push.session.report())
            if header.action is not PushAction.VALIDATE:
                return self._join(push, header)
        check_version(header, self._engine.weight_version)
        refuse_issues(issues)
        if header.manifest is None:
            raise _not_found(header.push_id)
        size_bytes = header.manifest.total_bytes
        if header.manifest.partial:
            size_bytes = completed(header.manifest, self._resident.require().manifest, self._tied).total_bytes
        if header.action is PushAction.VALIDATE:
            return PushStream.of_outcome(PushOutcome(_valid(header, digest)))
        self._make_room(size_bytes, partial=header.manifest.partial)
        # An adapter leaves the room that awaits the next version alone.
        room = allocate_arena if header.lora is not None else self._resident.room
        arena = await room(header.manifest.total_bytes)
        session = PushSession(header.push_id, header, header.manifest, digest, arena, self._clock)
        push = LivePush(session, Round.begin(header.num_streams), size_bytes)
        self._pushes[header.push_id] = push
        self._tell_change()
        return self._stream(push)

    def _join(self, push: LivePush, header: PushHeader) -> PushStream:
        self.check_free()
        session = push.session
        if push.applying is None and (session.num_attached == 0 or push.round.result.done()):
            push.round = Round.begin(header.num_streams)
            session.header = header  # how to apply is up to whoever takes it up again: a staged push is applied so
            if session.state is PushState.FAILED:
                session.state, session.issues = PushState.RECEIVING, ()
        session.touch()
        return self._stream(push)

    def _stream(self, push: LivePush) -> PushStream:
        return PushStream(push.session.push_id, push, None, lambda: self._advance(push))

    async def _wait_for_first_stream(self, header: PushHeader) -> None:
        try:
            async with asyncio.timeout(min(_FIRST_STREAM_TIMEOUT_S, header.staging_ttl_s)):
                while header.push_id not in self._pushes and header.push_id not in self._applied:
                    await self._changed.wait()
        except TimeoutError:
            raise _not_found(header.push_id) from None

    @property
    def _tied(self) -> Mapping[str, str]:
        return self._checkpoint.tied if self._checkpoint is not None else {}

    def _make_room(self, size_bytes: int, *, partial: bool) -> None:
        self.check_free()
        for push in list(self._pushes.values()):
            if push.is_held:
                raise push.in_progress()
            if push.session.state is not PushState.STAGED:
                self._drop(push, PushTruncatedError("another push took its place"))
        staged_bytes = sum(push.size_bytes for push in self._pushes.values())
        make_room(size_bytes, staged_bytes, self._max_staging_bytes, self._resident, partial=partial)

    def _advance(self, push: LivePush) -> None:
        """A stream of the push has ended or was cut off: carries the push out, or tells that bytes are missing."""
        if push.round.result.done() or push.applying is not None:
            pass
        elif push.session.is_complete and push.round.num_ended > 0:
            other = next((p for p in self._pushes.values() if p.applying is not None), None)
            if other is not None:
                push.round.result.set_exception(other.in_progress())
            else:
                # A task of its own: clients come and go, applying is carried through.
                push.applying = asyncio.create_task(self._carry_out(push), name=f"push {push.session.push_id}")
        elif push.round.is_over:
            push.round.result.set_exception(push.session.truncation())
        self._tell_change()

    async def _carry_out(self, push: LivePush) -> None:
        session, result = push.session, push.round.result
        try:
            session.state = PushState.STAGED
            refuse_issues(await asyncio.to_thread(session.tied_issues, self._tied))
            if session.header.action is PushAction.STAGE:
                result.set_result(PushOutcome(session.report()))
                return
            try:
                check_version(session.header, self._engine.weight_version)  # another may have been applied meanwhile
            except GenserveError as error:  # nothing was tried: it stays staged
                result.set_exception(error)
                return
            with push.round.told_on_time(session.header.apply.timeout_s):
                if session.manifest.partial:
                    await session.complete(self._resident.require(), self._tied)
                applied = await (self._updater if session.header.lora is None else self._loras).apply(session)
            session.state = PushState.APPLIED
            outcome = PushOutcome(session.report(), applied)
            self._remember(outcome)
            del self._pushes[session.push_id]
            _free(session)
            if not result.done():
                result.set_result(outcome)
        except Exception as error:
            session.state, session.issues = PushState.FAILED, (PushIssue("", str(error)),)
            if not result.done():
                result.set_exception(error)
        finally:
            if not result.done():
                session.state = PushState.FAILED
                result.cancel()
            push.applying = None
            session.touch()
            self._tell_change()
            # An error's traceback holds this frame, and this frame the error: memory of a push would wait for the
            # garbage collector.
            del push, session, result

    async def reserve(self, update_id: str) -> None:
        """Keeps pushes away until `release`; staged ones stay so. Raises ApplyInProgressError, and as `open`."""
        async with self._opening:
            check_control(self._board.phase)
            self.check_free()
            for push in self._pushes.values():
                if push.is_held:
                    raise push.in_progress()
            self._reserved_for = update_id

    def release(self) -> None:
        """Lets pushes in again."""
        self._reserved_for = ""

    def check_free(self) -> None:
        """Raises ApplyInProgressError while an update keeps pushes away."""
        if self._reserved_for:
            raise ApplyInProgressError(
                f"weight update {self._reserved_for!r} is under way",
                metadata={"update_id": self._reserved_for},
                retry_after_s=1.0,
            )

    def report(self, push_id: str) -> PushOutcome:
        """How far a push has come. Raises PushNotFoundError for one that was never opened or has timed out."""
        applied = self._applied.get(push_id)
        return applied if applied is not None else PushOutcome(self._find(push_id).session.report())

    async def commit(self, push_id: str, apply: ApplyOptions, expected_version: int | None = None) -> PushOutcome:
        """Applies a push whose bytes are all there; `expected_version` None = as its header says. Raises
        PushNotFoundError, ApplyInProgressError while it is being sent, and as `open` and `PushStream.finish`."""
        check_apply(apply, "apply")
        if push_id in self._applied:
            return self._applied[push_id]
        push = self._find(push_id)
        check_control(self._board.phase)
        if push.applying is None and push.session.num_attached > 0 and not push.round.result.done():
            raise push.in_progress()  # to join it would end the round of those who are sending
        header = replace(push.session.header, action=PushAction.APPLY, apply=apply, num_streams=1)
        if expected_version is not None:
            header = replace(header, expected_version=expected_version)
        stream = self._join(push, header)
        try:
            return await stream.finish()
        finally:
            stream.detach()

    def discard(self, push_id: str) -> PushOutcome:
        """Frees what a push has staged. Raises PushNotFoundError, and ApplyInProgressError while somebody is at it."""
        push = self._find(push_id)
        if push.is_held:
            raise push.in_progress()
        self._drop(push, _not_found(push_id))
        return PushOutcome(push.session.report())

    async def run(self) -> None:
        """Frees staged bytes whose time to live is over. Never returns."""
        while True:
            changed = self._changed
            idle = [push for push in self._pushes.values() if push.applying is None]
            due_s = min((push.session.idle_until_s for push in idle), default=None)
            try:
                async with asyncio.timeout(None if due_s is None else max(0.0, due_s - self._clock())):
                    await changed.wait()
            except TimeoutError:
                for push in idle:
                    if push.applying is None and self._clock() >= push.session.idle_until_s:
                        self._drop(push, push.session.truncation())

    async def close(self) -> None:
        """Refuses further pushes, waits for one that is being applied, and frees the bytes of all others."""
        self._closed = True
        applying = [push.applying for push in self._pushes.values() if push.applying is not None]
        if applying:
            await asyncio.wait(applying)
        for push in list(self._pushes.values()):
            self._drop(push, DrainingError("the daemon is shutting down"))

    def _find(self, push_id: str) -> LivePush:
        if push_id not in self._pushes:
            raise _not_found(push_id)
        return self._pushes[push_id]

    def _drop(self, push: LivePush, error: GenserveError) -> None:
        self._pushes.pop(push.session.push_id, None)
        _free(push.session)
        push.gone.set()
        if not push.round.result.done():
            push.round.result.set_exception(error)
        self._tell_change()

    def _remember(self, outcome: PushOutcome) -> None:
        self._applied[outcome.push.push_id] = outcome
        if len(self._applied) > _NUM_REMEMBERED:
            self._applied.popitem(last=False)

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _free(session: PushSession) -> None:
    """In a thread, as it takes long enough for token streams to notice."""
    asyncio.get_running_loop().run_in_executor(None, session.close)


def _valid(header: PushHeader, digest: str) -> PushReport:
    total_bytes = header.manifest.total_bytes if header.manifest is not None else 0
    return PushReport(header.push_id, PushState.VALID, header.weight_version, 0, total_bytes, manifest_digest=digest)


def _not_found(push_id: str) -> PushNotFoundError:
    return PushNotFoundError(f"there is no push {push_id!r}; it may have timed out", metadata={"push_id": push_id})
