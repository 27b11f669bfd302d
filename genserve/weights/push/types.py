"""The words of a push: what a trainer asks for, how far it has come, what came of it."""

import enum
from dataclasses import dataclass, field

from genserve.engine.protocol import KvPolicy, PauseMode
from genserve.tensors.manifest import Manifest, PushIssue

__all__ = [
    "DEFAULT_APPLY_TIMEOUT_S",
    "DEFAULT_STAGING_TTL_S",
    "Applied",
    "ApplyOptions",
    "LoraAdapter",
    "PushAction",
    "PushHeader",
    "PushIssue",
    "PushOutcome",
    "PushReport",
    "PushState",
    "StepTiming",
]

DEFAULT_APPLY_TIMEOUT_S = 300.0
DEFAULT_STAGING_TTL_S = 300.0


class PushAction(enum.Enum):
    """What to do once every byte is there; the values are the names of genserve.v1.PushAction without their prefix."""

    APPLY = "APPLY"
    STAGE = "STAGE"
    VALIDATE = "VALIDATE"


class PushState(enum.Enum):
    """How far a push has come; the values are the names of genserve.v1.PushState without their prefix."""

    RECEIVING = "RECEIVING"
    STAGED = "STAGED"
    PREPARING = "PREPARING"
    APPLYING = "APPLYING"
    APPLIED = "APPLIED"
    FAILED = "FAILED"
    VALID = "VALID"


@dataclass(frozen=True, slots=True)
class ApplyOptions:
    """How a push is applied. `timeout_s`: seconds for all of it, preparation included; under `pause_lease_id` the
    engine stays paused afterwards."""

    pause_mode: PauseMode = PauseMode.KEEP
    kv_policy: KvPolicy = KvPolicy.RECOMPUTE
    pause_lease_id: str = ""
    timeout_s: float = DEFAULT_APPLY_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter whose tensors are pushed; `config` is PEFT's adapter_config.json, as JSON."""

    lora_name: str
    config: str


@dataclass(frozen=True, slots=True)
class PushHeader:
    """Opens a push. An empty `push_id` is minted; further streams may bring `manifest_digest` instead of `manifest`;
    `staging_ttl_s`: seconds that bytes are kept after the last frame that brought something; `lora`: no weights, but an
    adapter; `attempt` names the streams whose bytes belong together, "" = those that are here at a time."""

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

    @property
    def lora_name(self) -> str:
        """The adapter that it brings; "" for weights."""
        return "" if self.lora is None else self.lora.lora_name


@dataclass(frozen=True, slots=True)
class PushReport:
    """A push as far as it has come. `missing`: byte ranges [start, end) in order, that `attempt` lacks."""

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

    @classmethod
    def valid(cls, header: PushHeader, digest: str) -> "PushReport":
        """Of a dry run whose manifest is good."""
        total_bytes = header.manifest.total_bytes if header.manifest is not None else 0
        return cls(header.push_id, PushState.VALID, header.weight_version, 0, total_bytes, manifest_digest=digest)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Wall time, in seconds, of one step: receive, verify, prepare, pause, commit or resume."""

    step: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Applied:
    """What applying did. `paused_s`: seconds that generation stood still; None when it was paused and stays so."""

    previous_version: int
    active_version: int
    timings: tuple[StepTiming, ...]
    paused_s: float | None
    requests_kept: int
    requests_aborted: int


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """What came of a push; `applied` is None when nothing was applied."""

    push: PushReport
    applied: Applied | None = None
