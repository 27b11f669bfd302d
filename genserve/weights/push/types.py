"""The domain types of a push: the request of a trainer, the progress, and the outcome."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from genserve.control.membership import FleetCommit
from genserve.control.pause import Hold
from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import PushConflictError
from genserve.tensors.manifest import Manifest, PushIssue

DEFAULT_APPLY_TIMEOUT_S = 300.0
DEFAULT_STAGING_TTL_S = 300.0
DEFAULT_PREPARED_TTL_S = 60.0
MAX_VERSION = (1 << 32) - 1


class PushAction(enum.Enum):
    """What to do when every byte has arrived. The values are the names of genserve.v1.PushAction without their
    prefix."""

    APPLY = "APPLY"
    STAGE = "STAGE"
    VALIDATE = "VALIDATE"
    PREPARE = "PREPARE"


class PrepareMode(enum.Enum):
    """What generation does while a version is prepared. The values are the names of genserve.v1.PrepareMode without
    their prefix."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"


class PushKind(enum.Enum):
    """What was pushed: a version, an adapter, or a version through vLLM's own transfer."""

    WEIGHTS = "weights"
    LORA = "lora"
    TRANSFER = "transfer"


class PushState(enum.Enum):
    """The state of a push. The values are the names of genserve.v1.PushState without their prefix."""

    RECEIVING = "RECEIVING"
    STAGED = "STAGED"
    PREPARING = "PREPARING"
    PREPARED = "PREPARED"
    APPLYING = "APPLYING"
    APPLIED = "APPLIED"
    FAILED = "FAILED"
    VALID = "VALID"


@dataclass(frozen=True, slots=True)
class HoldOptions:
    """How the engine is held still while its weights change; under `pause_lease_id` it stays paused afterwards."""

    pause_mode: PauseMode = PauseMode.KEEP
    kv_policy: KvPolicy = KvPolicy.RECOMPUTE
    pause_lease_id: str = ""


@dataclass(frozen=True, slots=True)
class ApplyOptions(HoldOptions):
    """How a push is applied. `timeout_s`: seconds for all of it, preparation included."""

    timeout_s: float = DEFAULT_APPLY_TIMEOUT_S
    prepare_mode: PrepareMode = PrepareMode.RUNNING


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter whose tensors are pushed; `config` is PEFT's adapter_config.json, as JSON."""

    lora_name: str
    config: str


@dataclass(frozen=True, slots=True)
class PushHeader:
    """Opens a push.

    An empty `push_id` is replaced by a generated one. Further streams may bring `manifest_digest` instead of
    `manifest`. `staging_ttl_s`: seconds that bytes are kept after the last frame with something new. `lora`: the
    tensors are an adapter, and both versions are the adapter's: `weight_version` 0 = the next one, `expected_version` 0
    = none is loaded. `attempt` names the streams whose bytes belong together; "" = the streams that are open at a
    time. `prepared_ttl_s`: seconds that a prepared push waits for its commit. `content_digest` is what
    `tensors.content` computes of the push's tensors; "" = not compared. `preemptible`: another push takes its place
    while it waits for its commit. `origin` names the memory that took the bytes first, here or in the daemon
    that they were fetched from; "" = here. Bytes of one origin never differ, wherever they are; those of one id may,
    because another push may be sent under it. `yields`: it gives way to another attempt that is being sent, instead of
    being in conflict with it. `fleet`: whose version it becomes, if a router has asked for it.
    """

    push_id: str
    weight_version: int
    expected_version: int | None = None
    manifest: Manifest | None = None
    manifest_digest: str = ""
    action: PushAction = PushAction.APPLY
    apply: ApplyOptions = field(default_factory=ApplyOptions)
    staging_ttl_s: float = DEFAULT_STAGING_TTL_S
    num_streams: int = 1
    force: bool = False
    lora: LoraAdapter | None = None
    attempt: str = ""
    prepared_ttl_s: float = DEFAULT_PREPARED_TTL_S
    content_digest: str = ""
    preemptible: bool = False
    origin: str = ""
    yields: bool = False
    fleet: FleetCommit | None = None

    @property
    def lora_name(self) -> str:
        """The name of the adapter; "" for weights."""
        return "" if self.lora is None else self.lora.lora_name

    @property
    def kind(self) -> PushKind:
        """What it replaces."""
        return PushKind.WEIGHTS if self.lora is None else PushKind.LORA

    @property
    def replaces_weights(self) -> bool:
        """Whether workers build a version for it as soon as its bytes are there."""
        return self.lora is None and self.action in (PushAction.APPLY, PushAction.PREPARE)


@dataclass(frozen=True, slots=True)
class PushIdentity:
    """What a push id identifies. The same id with another identity is a conflict."""

    manifest_digest: str
    weight_version: int
    lora: LoraAdapter | None
    content_digest: str = ""
    """What the first header said of it; a header may leave it out."""

    def check(self, header: PushHeader, digest: str) -> None:
        """Raises PushConflictError unless the header belongs to this push."""
        contents = self.content_digest if "" in (self.content_digest, header.content_digest) else header.content_digest
        version = header.weight_version
        if self.lora is not None and 0 in (version, self.weight_version):
            version = self.weight_version  # 0 is the next one of an adapter, and a copy of it names that
        if PushIdentity(digest, version, header.lora, contents) != self:
            raise PushConflictError(
                f"push {header.push_id!r} exists with another manifest, version, adapter or content digest",
                metadata={"push_id": header.push_id, "weight_version": str(self.weight_version)},
            )


@dataclass(frozen=True, slots=True)
class PushReport:
    """The progress of a push. `missing`: byte ranges [start, end) in order that `attempt` lacks. `content_digest` is ""
    until it is computed, if it is."""

    push_id: str
    state: PushState
    weight_version: int
    received_bytes: int
    total_bytes: int
    missing: tuple[tuple[int, int], ...] = ()
    issues: tuple[PushIssue, ...] = ()
    manifest_digest: str = ""
    lora_name: str = ""
    attempt: str = ""
    content_digest: str = ""

    @classmethod
    def valid(cls, header: PushHeader, digest: str) -> "PushReport":
        """The report of a dry run with a valid manifest."""
        total_bytes = header.manifest.total_bytes if header.manifest is not None else 0
        return cls(header.push_id, PushState.VALID, header.weight_version, 0, total_bytes, manifest_digest=digest)


@dataclass(frozen=True, slots=True)
class PushInFlight:
    """A push in flight. `received_bytes`: distinct bytes that count for the present attempt. `num_streams`: those that
    are open. `began_at_s` and `state_since_s`: when its attempt and its state began, in Unix seconds."""

    push_id: str
    state: PushState
    weight_version: int
    received_bytes: int
    total_bytes: int
    lora_name: str
    num_streams: int
    began_at_s: float
    state_since_s: float


@dataclass(slots=True)
class Applied:
    """The result of applying. `step_s`: wall time of each step, in the order of `outcomes.STEPS`. `paused_s`: seconds
    that generation was stopped; None if it was paused before and stays so. `recomputed_tokens`: tokens whose keys and
    values are to be computed again.

    The last three may be unknown when a push is answered. They are None until they are known, and written then.
    """

    previous_version: int
    active_version: int
    step_s: Mapping[str, float]
    paused_s: float | None
    requests_kept: int
    requests_aborted: int
    recomputed_tokens: int | None = None
    longest_wait_s: float | None = None
    discard_s: float | None = None

    @classmethod
    def in_hold(cls, previous_version: int, active_version: int, step_s: Mapping[str, float], hold: Hold) -> "Applied":
        """While the engine was held still."""
        return cls(
            previous_version,
            active_version,
            step_s,
            hold.paused_s,
            hold.kept,
            hold.aborted,
            hold.recomputed_tokens,
        )


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """The outcome of a push. `applied` is None if nothing was applied."""

    push: PushReport
    applied: Applied | None = None
