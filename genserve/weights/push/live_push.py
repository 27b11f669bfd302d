"""One push with bytes in the daemon. It owns the push's state, attempts, streams, bytes and result.

It owns no task and no rule about other pushes: `registry` decides who may open one, and `completion` carries it out.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from genserve.aio import Change
from genserve.errors import (
    ApplyInProgressError,
    ChecksumMismatchError,
    DeadlineError,
    GenserveError,
    PushConflictError,
    PushNotFoundError,
    PushTruncatedError,
)
from genserve.tensors.manifest import PushIssue
from genserve.weights.push.contents import Contents
from genserve.weights.push.lifecycle import Lifecycle, State
from genserve.weights.push.staging import Staging
from genserve.weights.push.types import PushAction, PushHeader, PushIdentity, PushOutcome, PushReport, PushState
from genserve.weights.resident import ArenaBytes, ResidentVersion

# A step that exceeds the timeout ends at about this time, and its error says more.
_LATE_S = 0.25
_READABLE = frozenset({State.STAGED, State.PREPARING, State.PREPARED, State.APPLYING})


@dataclass(slots=True)
class Attempt:
    """The streams of one attempt, and the result that all of them answer. `name` is "" for one without a name.
    `began_at_s`: when it began, in Unix seconds, for people."""

    num_streams: int
    name: str
    result: "asyncio.Future[PushOutcome]"
    began_at_s: float
    num_attached: int = 0
    num_opened: int = 0
    num_sending: int = 0
    num_ended: int = 0

    @classmethod
    def begin(cls, num_streams: int, name: str) -> "Attempt":
        """An attempt that nobody has joined."""
        result: asyncio.Future[PushOutcome] = asyncio.get_running_loop().create_future()
        # If all clients are gone, nobody retrieves the error, and asyncio must not log this.
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        return cls(num_streams, name, result, time.time())

    def answer(self, outcome: PushOutcome | Exception) -> None:
        """Gives all streams the outcome, unless they got one before."""
        if self.result.done():
            return
        if isinstance(outcome, PushOutcome):
            self.result.set_result(outcome)
        else:
            self.result.set_exception(outcome)

    @contextmanager
    def answered_on_time(self, timeout_s: float) -> Iterator[None]:
        """Gives streams a DeadlineError if the block takes longer than `timeout_s`: undoing, or a worker that hangs,
        may take more time."""
        timer = asyncio.get_running_loop().call_later(
            timeout_s + _LATE_S,
            lambda: self.answer(DeadlineError(f"applying took longer than {timeout_s:g} s; GetPush tells the outcome")),
        )
        try:
            yield
        finally:
            timer.cancel()

    @property
    def is_live(self) -> bool:
        """Whether a stream of the attempt is open and has no result yet."""
        return self.num_attached > 0 and not self.result.done()

    @property
    def has_ended(self) -> bool:
        """Whether every announced stream has sent its end frame."""
        return self.num_ended >= self.num_streams

    @property
    def is_over(self) -> bool:
        """Whether no more bytes can arrive: a stream that was cut off does not return."""
        return self.has_ended or (self.num_opened >= self.num_streams and self.num_sending == 0)


class LivePush:
    """A push with bytes in the daemon. `size_bytes`: its memory, completed if it is partial; none once the version is
    live, which has it then. `clock` gives monotonic seconds. `header` is that of the stream that began the present
    attempt, with the digest of the contents that any header has said, and with the origin."""

    def __init__(
        self,
        header: PushHeader,
        digest: str,
        staging: Staging,
        size_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        changed: Change | None = None,
    ) -> None:
        self.push_id = header.push_id
        self.identity = PushIdentity(digest, header.weight_version, header.lora, header.content_digest)
        self.staging = staging
        self.size_bytes = size_bytes
        self.changed = Change() if changed is None else changed
        """Notified whenever its state has changed; other pushes may share it."""
        self.arrived = Change()
        """Notified whenever bytes have arrived, and with `changed`."""
        self.lifecycle = Lifecycle(self.changed, self.arrived)
        self.attempt = Attempt.begin(header.num_streams, header.attempt)
        self.num_attached = 0
        self.issues: tuple[PushIssue, ...] = ()
        self.gone = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        """The task that carries it out."""
        self.served: ResidentVersion | None = None
        """The version that it brought, once that is live."""
        self.is_to_wait = False
        """Whether it was staged because it was sent for that, or to be prepared: its bytes wait for a commit."""
        self.was_prepared = False
        """Whether the present attempt is the commit of a push that was prepared."""
        self.compare_served: Callable[[str, int, bytes | memoryview], None] = _nothing_served
        """Compares bytes instead of the arena, once the arena belongs to the resident store."""
        self.is_checked = False
        """Whether its tensors were compared with each other: bytes that are there do not change."""
        self.open_s = self.check_s = self.wait_s = 0.0
        """Seconds of these steps: `registry` measures the first one, `completion` the second, `apply` the third."""
        self.content_digest = ""  # computed if it is needed
        self._contents: Contents | None = None
        self._nonce = uuid.uuid4().hex
        self.header = self._with_known(header)
        self.stream_header = self.header
        """That of the stream that began last: what a commit says holds for that commit alone."""
        self._staged_as: PushHeader | None = None
        self._error: GenserveError | None = None
        self.clock = clock
        self.touched_s = clock()
        """When something new arrived last, on the clock: its time to live begins again."""

    @property
    def is_readable(self) -> bool:
        """Whether its bytes are complete and checked, and do not change in this state."""
        return self.lifecycle.state in _READABLE

    @property
    def is_held(self) -> bool:
        """Whether somebody sends it or the daemon carries it out."""
        return self.lifecycle.is_busy or self.num_attached > 0

    @property
    def idle_until_s(self) -> float:
        """When its time to live ends, on the clock."""
        is_prepared = self.lifecycle.state is State.PREPARED
        return self.touched_s + (self.header.prepared_ttl_s if is_prepared else self.header.staging_ttl_s)

    @property
    def is_settling(self) -> bool:
        """Whether it is carried out and a commit has to wait for the end: it is checked, or prepared without being
        applied."""
        state = self.lifecycle.state
        prepares = state is State.PREPARING and self.header.action is PushAction.PREPARE
        return state is State.CHECKING or prepares

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Adds the seconds of the block to those for which its bytes were checked, or completed."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.check_s += time.perf_counter() - began_s

    @property
    def steps_before_prepare(self) -> dict[str, float]:
        """Seconds of each step until it was its turn to be prepared. `verify` is a part of `receive`: the checksums of
        what was received, of all streams together."""
        return {
            "open": self.open_s,
            "receive": self.staging.receive_s,
            "verify": self.staging.verify_s,
            "check": self.check_s,
            "wait": self.wait_s,
        }

    def join(self, header: PushHeader) -> Attempt:
        """The attempt that a stream with this header takes part in; a new one unless somebody is at it.

        Bytes that an earlier attempt has left count in a new one only if both bear the same name. Raises
        PushConflictError for a stream of another attempt than the one that is here, and ChecksumMismatchError
        for other contents than those that are prepared.
        """
        asks_again = header.action is PushAction.PREPARE and header.attempt == self.attempt.name != ""
        if asks_again and self.lifecycle.state is State.PREPARED:
            if header.content_digest:  # the first header may have left it out
                self.check_digest(header.content_digest)
            if self.attempt.result.exception() is not None:  # the commit was late, or the answer to the preparation
                self.attempt = Attempt.begin(header.num_streams, header.attempt)
                self.attempt.answer(PushOutcome(self.report()))
            return self.attempt  # its bytes are compared, and it gets what it was told before
        if self.lifecycle.is_busy:
            return self.attempt  # its bytes are compared, and it gets the outcome
        if self.attempt.is_live:
            if self.meets_other(header):
                raise PushConflictError(
                    f"attempt {header.attempt!r} at push {self.push_id!r} meets attempt {self.attempt.name!r}, which "
                    "is still being sent; nothing was applied",
                    metadata={"push_id": self.push_id},
                )
            return self.attempt
        self.lifecycle.go("joined")
        if header.attempt == "" or header.attempt != self.attempt.name:
            self.staging.begin_anew()
        self._begin(header)
        self.stream_header = self.header
        return self.attempt

    def meets_other(self, header: PushHeader) -> bool:
        """Whether streams of another attempt than the header's are open."""
        return not self.lifecycle.is_busy and self.attempt.is_live and header.attempt != self.attempt.name

    def begin_commit(self, header: PushHeader) -> Attempt:
        """An attempt without streams: what is staged is to be applied as the header says."""
        was_prepared = self.lifecycle.state is State.PREPARED
        self._begin(header)
        self.was_prepared = was_prepared
        return self.attempt

    def _begin(self, header: PushHeader) -> None:
        self.attempt.answer(self.truncation())  # if its streams were cut off before others were opened
        self.attempt = Attempt.begin(header.num_streams, header.attempt)
        self.was_prepared = False
        self.header = self._with_known(header)
        self.issues = ()
        self.touch()

    def _with_known(self, header: PushHeader) -> PushHeader:
        """The header, with the digest that an earlier one has said and the origin here where it says none."""
        known_digest = header.content_digest or self.identity.content_digest
        return replace(header, content_digest=known_digest, origin=header.origin or self._nonce)

    def check_digest(self, named: str) -> None:
        """Raises ChecksumMismatchError if the contents, whose digest is known, have another one."""
        if self.content_digest != named:
            raise ChecksumMismatchError(
                f"the contents of push {self.push_id!r} have SHA-256 {self.content_digest}, the header says "
                f"{named}: push what it means under another push_id, or discard what is here",
                metadata={"push_id": self.push_id, "expected": named, "found": self.content_digest},
            )

    def check_here(self) -> None:
        """Raises what ended it, if its bytes are gone."""
        if self._error is not None:
            raise self._error.again()

    def touch(self) -> None:
        """Records that something new arrived: the time to live starts again."""
        self.touched_s = self.clock()

    def serve(self) -> ResidentVersion:
        """Records that its version is live: from now on the arena belongs to the resident store, with what is known of
        the version."""
        version = self.served = ResidentVersion(
            self.header.weight_version,
            self.staging.weights,
            ArenaBytes(self.staging.arena),
            self.push_id,
            self.content_digest,
            self.header.origin,
        )
        if self.staging.weights is not self.staging.manifest:
            # What this daemon has completed is its own, and more than what the push brought.
            version.content_digest, version.origin = "", f"{self._nonce} completed"
        self.size_bytes = 0  # the resident store counts it from now on
        if self.header.fleet is not None:
            self.header.fleet.served()
        return version

    def begin_digest(self) -> "asyncio.Task[str]":
        """Begins to compute `content_digest`, while bytes arrive."""
        if self._contents is None:
            self._contents = Contents(self.staging, self.arrived)
        return self._contents.begin()

    async def compute_digest(self) -> None:
        """Computes `content_digest`, once: every byte is there and does not change."""
        self.content_digest = await asyncio.shield(self.begin_digest())

    def stage(self) -> None:
        """Records that the bytes passed the checks."""
        self.lifecycle.go("staged")
        self._staged_as = self.stream_header
        self.is_to_wait |= self.header.action in (PushAction.STAGE, PushAction.PREPARE)

    def unprepare(self) -> None:
        """Records that workers free what they had prepared. One that waited for a commit waits as a staged one, and
        its time for that begins."""
        if self.lifecycle.state is State.PREPARED:
            self.touch()
            self.lifecycle.go("unprepared")

    def truncate(self) -> None:
        """Records that the attempt ended with bytes or end frames missing. Bytes that an earlier one staged do not
        change."""
        self.attempt.answer(self.truncation())
        self.lifecycle.go("truncated")
        if self._staged_as is not None:
            self.lifecycle.go("restored")
            self.header = self.stream_header = self._staged_as
            self.attempt = Attempt.begin(self.header.num_streams, self.header.attempt)
            self.staging.count_all()

    def fail(self, error: Exception) -> None:
        """Nothing changed. The bytes of a push that was sent to wait for a commit wait on, if nothing was tried; others
        are kept only until they are in the way."""
        if self.lifecycle.is_busy or not self.is_to_wait:
            self.lifecycle.go("failed")
            self.issues = (PushIssue("", str(error)),)

    def break_off(self) -> None:
        """Cancels the streams after the task of the push was cancelled."""
        self.lifecycle.go("failed")
        self.attempt.result.cancel()

    def drop(self, error: GenserveError) -> None:
        """Before its bytes are freed: streams and later callers get `error`."""
        self.lifecycle.go("dropped")
        self._error = error.again()
        if self._contents is not None:
            self._contents.end()
        self.gone.set()
        self.attempt.answer(self._error)

    def close(self) -> None:
        """Frees the bytes, unless they are served. Call it in a thread, because it would delay token streams."""
        if self.served is None:
            self.staging.close()

    def in_progress(self) -> ApplyInProgressError:
        """The error for other changes of the weights while this push is in progress."""
        return ApplyInProgressError(
            f"push {self.push_id!r} is in progress ({self.lifecycle.push_state.value})",
            metadata={"push_id": self.push_id},
            retry_after_s=1.0,
        )

    def truncation(self) -> PushTruncatedError:
        """The error for a push that ended with bytes or end frames missing."""
        total_bytes = self.staging.manifest.total_bytes
        missing_bytes = total_bytes - self.staging.counted.total
        lacks = f"lacks {missing_bytes} of {total_bytes} bytes"
        if not missing_bytes:
            lacks = f"did not get an end frame from all of its {self.attempt.num_streams} streams"
        metadata = {"push_id": self.push_id, "missing_bytes": str(missing_bytes)}
        return PushTruncatedError(f"push {self.push_id!r} {lacks}", metadata=metadata)

    def not_found(self) -> PushNotFoundError:
        """The error for a push that was discarded or has expired."""
        return PushNotFoundError(
            f"push {self.push_id!r} has expired or was discarded", metadata={"push_id": self.push_id}
        )

    @property
    def num_counted(self) -> int:
        """Distinct bytes that count for the present attempt."""
        if self.lifecycle.state is not State.RECEIVING:
            return self.staging.manifest.total_bytes
        return self.staging.counted.total if self._keeps_counting else 0

    @property
    def _keeps_counting(self) -> bool:
        """Whether the bytes still count for the next stream: those of an attempt without a name do not."""
        return self.attempt.name != "" or self.attempt.is_live

    def report(self, state: PushState | None = None) -> PushReport:
        """The progress of the push."""
        total_bytes = self.staging.manifest.total_bytes
        missing: tuple[tuple[int, int], ...] = ()
        if self.lifecycle.state is State.RECEIVING and total_bytes:
            missing = self.staging.missing if self._keeps_counting else ((0, total_bytes),)
        return PushReport(
            push_id=self.push_id,
            state=state or self.lifecycle.push_state,
            weight_version=self.header.weight_version,
            received_bytes=self.num_counted,
            total_bytes=total_bytes,
            missing=missing,
            issues=self.issues,
            manifest_digest=self.identity.manifest_digest,
            lora_name=self.header.lora_name,
            attempt=self.attempt.name,
            content_digest=self.content_digest,
        )


def _nothing_served(attempt: str, offset: int, data: bytes | memoryview) -> None:
    """Placeholder until the version is served. Bytes that nothing compares must never pass."""
    raise RuntimeError("the push is not served: its bytes lie in its own arena")
