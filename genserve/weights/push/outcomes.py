"""The outcomes of pushes: of those whose bytes are gone, by id, and of all as numbers."""

import weakref
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TypeVar

from genserve.errors import GenserveError, PushConflictError
from genserve.observe.histogram import Histogram
from genserve.tensors.manifest import PushIssue
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.types import Applied, LoraAdapter, PushHeader, PushIdentity, PushKind, PushOutcome, PushState
from genserve.weights.resident import ArenaBytes, ResidentStore, ResidentVersion

STEPS = ("open", "receive", "verify", "check", "wait", "prepare", "pause", "commit", "resume")
"""The steps of a push in their order. docs/weights.md says what each includes; `LivePush.steps_before_prepare` and
`PushApplier.apply` measure them."""
STEP_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ROLLED_BACK = "PUSH_ROLLED_BACK"
_UNKNOWN = "INTERNAL"
_NUM_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class AppliedPush:
    """A push that was applied. A repeat gets the first `answer` again; `outcome` gains what is known later. `version`
    returns its bytes while they are served; an adapter has none."""

    kind: PushKind
    identity: PushIdentity
    attempt: str
    answer: PushOutcome
    outcome: PushOutcome
    version: Callable[[], ResidentVersion | None]

    def compare(self, resident: ResidentStore, offset: int, data: bytes | memoryview) -> bool:
        """Whether the bytes could be compared with the applied ones, which are kept while they are served. Raises
        PushConflictError if they differ."""
        version = self.version()
        source = version.source if version is not None and resident.served is version else None
        if not isinstance(source, ArenaBytes):
            return False
        if source.arena.equals(offset, data):
            return True
        push_id = self.outcome.push.push_id
        raise PushConflictError(
            f"push {push_id!r} was applied with other bytes between {offset} and {offset + len(data)}",
            metadata={"push_id": push_id, "offset": str(offset)},
        )


@dataclass(frozen=True, slots=True)
class RefusedPush:
    """A push in which one attempt brought other bytes than another. `due_s`: until when it is remembered."""

    kind: PushKind
    attempt: str
    outcome: PushOutcome
    error: PushConflictError
    due_s: float


RecordT = TypeVar("RecordT", AppliedPush, RefusedPush)


class Latest(dict[str, RecordT]):
    """The latest records by push id, the latest last, of each kind of push for itself: adapters, which may be pushed
    much more often, do not push out what is known of the weights that are served."""

    def add(self, push_id: str, record: RecordT, keeping: Collection[str] = ()) -> None:
        """A new record, which replaces one of this id. Those with the ids of `keeping` are forgotten for none."""
        self.pop(push_id, None)
        self[push_id] = record
        alike = [each for each, known in self.items() if known.kind is record.kind]
        others = [each for each in alike if each not in keeping]
        for each in others[: max(0, len(alike) - _NUM_REMEMBERED)]:
            del self[each]


class PushMeasures:
    """Counted once for each time that the daemon was done with a push. `outcomes`: by kind and by the name of the state
    that it was left in, or the reason of its error. `paused`: seconds without generation, of those that were applied.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[PushKind, str]] = Counter()
        self.steps = {step: Histogram(STEP_BOUNDS_S) for step in STEPS}
        self.paused = Histogram(STEP_BOUNDS_S)

    @property
    def num_rolled_back(self) -> int:
        """Pushes after which the version before was served again."""
        return sum(count for (_, outcome), count in self.outcomes.items() if outcome == _ROLLED_BACK)

    def ended(self, kind: PushKind, state: str) -> None:
        """It waits in this state for what its trainer does next."""
        self.outcomes[kind, state] += 1

    def applied(self, kind: PushKind, applied: Applied) -> None:
        """It is served."""
        self.outcomes[kind, "APPLIED"] += 1
        for step, duration_s in applied.step_s.items():
            self.steps[step].add(duration_s)
        if applied.paused_s is not None:
            self.paused.add(applied.paused_s)

    def failed(self, kind: PushKind, error: Exception) -> None:
        """It was not carried out."""
        self.outcomes[kind, error.reason if isinstance(error, GenserveError) else _UNKNOWN] += 1


class Outcomes:
    """The latest outcomes by push id. `resident` has the bytes of the served version. `clock` gives monotonic
    seconds."""

    def __init__(self, resident: ResidentStore, clock: Callable[[], float]) -> None:
        self._resident = resident
        self._clock = clock
        self.measures = PushMeasures()
        """The same as numbers."""
        self.applied = Latest[AppliedPush]()
        """Applied pushes."""
        self._refused = Latest[RefusedPush]()

    def repeated(self, header: PushHeader) -> AppliedPush | None:
        """The applied push that answers this header, if any. The bytes of an adapter are not kept, so another attempt
        loads it again."""
        applied = self.applied.get(header.push_id)
        if applied is None or header.lora is None or applied.attempt == header.attempt != "":
            return applied
        return None

    def compare(self, applied: AppliedPush, attempt: str, offset: int, data: bytes | memoryview) -> None:
        """Compares bytes that are sent again for an applied push.

        Raises PushConflictError for other bytes, and for bytes that cannot be compared although they may be live,
        because nobody must be told that such bytes are live. The attempt that was applied need not prove its bytes. A
        push that was replaced since gets its original answer.
        """
        if applied.compare(self._resident, offset, data) or (attempt and attempt == applied.attempt):
            return
        lora = applied.identity.lora
        alike = [each for each in self.applied.values() if _target(each.identity.lora) == _target(lora)]
        if alike and alike[-1] is applied:
            push_id = applied.outcome.push.push_id
            raise PushConflictError(
                f"push {push_id!r} was applied, and the daemon does not keep its bytes for a comparison: GetPush "
                "tells its outcome; push other weights under another push_id",
                metadata={"push_id": push_id},
            )

    def refused(self, push_id: str) -> RefusedPush | None:
        """The push with this id that was refused for good."""
        refused = self._refused.get(push_id)
        if refused is not None and self._clock() >= refused.due_s:
            self._refused.pop(push_id, None)
            return None
        return refused

    def answers(self, header: PushHeader) -> bool:
        """Whether a stream with this header gets its answer here."""
        return self.repeated(header) is not None or self.refusal(header) is not None

    def refusal(self, header: PushHeader) -> RefusedPush | None:
        """The refused push with this id, for streams of the same attempt. Another attempt may start over."""
        refused = self.refused(header.push_id)
        return refused if refused is not None and header.attempt in ("", refused.attempt) else None

    def add_applied(
        self, push: LivePush, outcome: PushOutcome, version: ResidentVersion | None, loaded: Collection[str] = ()
    ) -> AppliedPush:
        """Records an applied push. `loaded`: the ids of those that brought the adapters that are loaded."""
        self._refused.pop(push.push_id, None)
        # A weak reference: the manifest of a large model is not kept for each outcome.
        known = weakref.ref(version) if version is not None else _nothing
        answer = replace(outcome, applied=None if outcome.applied is None else replace(outcome.applied))
        record = AppliedPush(push.header.kind, push.identity, push.attempt.name, answer, outcome, known)
        self.applied.add(push.push_id, record, loaded)
        return record

    def add_refused(self, push: LivePush, error: PushConflictError) -> None:
        """Records a push in conflict with itself: streams of that attempt get the error, for its time to live."""
        self.measures.failed(push.header.kind, error)
        issue = PushIssue("", error.message)
        report = replace(push.report(PushState.FAILED), received_bytes=0, missing=(), issues=(issue,))
        due_s = self._clock() + push.header.staging_ttl_s
        refused = RefusedPush(push.header.kind, push.attempt.name, PushOutcome(report), error.again(), due_s)
        self._refused.add(push.push_id, refused)

    def forget_refused(self, push_id: str) -> PushOutcome | None:
        """Makes the id free again, and returns what was refused under it."""
        refused = self.refused(push_id)
        if refused is None:
            return None
        self._refused.pop(push_id, None)
        return refused.outcome


def _target(lora: LoraAdapter | None) -> str:
    """What a push replaces: an adapter, by its name, or the weights."""
    return "" if lora is None else lora.lora_name


def _nothing() -> None:
    """For an adapter, whose bytes are not kept."""
