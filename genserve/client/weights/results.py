"""The results of weight calls: a push, its progress and what applying it did, and the weights that a daemon serves."""

import math
from dataclasses import dataclass, field

from google.protobuf.message import Message

from genserve.client.state import EngineState
from genserve.tensors.dtypes import item_bytes
from genserve.tensors.manifest import Manifest
from genserve.tensors.ranges import Range
from genserve.transport.fields import word_of
from genserve.v1 import weights_pb2
from genserve.wire.conversions import manifest_of, seconds_of


@dataclass(frozen=True, slots=True)
class PushProgress:
    """Progress of sending. `sent_bytes` counts each byte once, also after a resume. `total_bytes` is what this caller
    sends."""

    push_id: str
    sent_bytes: int
    total_bytes: int
    elapsed_s: float
    num_resumes: int


@dataclass(frozen=True, slots=True)
class Push:
    """A push as the daemon knows it. `state` is one of receiving, staged, preparing, prepared, applying, applied,
    failed, valid.

    `missing` are the byte ranges [start, end) that `attempt` lacks. `issues` are pairs of a tensor's name (or "") and a
    description. `content_digest`: SHA-256 of its contents, in hex, of a push that was sent with one or is prepared.
    """

    push_id: str
    state: str
    weight_version: int
    received_bytes: int
    total_bytes: int
    missing: list[Range]
    issues: list[tuple[str, str]]
    attempt: str = ""
    content_digest: str = ""

    @classmethod
    def of(cls, message: weights_pb2.Push) -> "Push":
        """From the wire."""
        return cls(
            push_id=message.push_id,
            state=word_of(weights_pb2.PushState, message.state),
            weight_version=message.weight_version,
            received_bytes=message.received_bytes,
            total_bytes=message.total_bytes,
            missing=[(each.start, each.end) for each in message.missing],
            issues=[(issue.tensor, issue.description) for issue in message.issues],
            attempt=message.attempt,
            content_digest=message.content_digest,
        )


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of applying. `step_s` are seconds by step: open, receive, verify, check, wait, prepare, pause, commit,
    resume. `paused_s` is how long generation was paused for it: 0.0 if the engine was paused or asleep before and stays
    so.

    `recomputed_tokens`: tokens of running sequences whose keys and values have to be computed again because of it.
    `longest_wait_s`: seconds that a sequence was without output because of it. `discard_s`: seconds that it took to
    free the previous version. The last three may be None in the answer: `get_push` returns them a moment later,
    when they are known.
    """

    previous_version: int
    active_version: int
    step_s: dict[str, float]
    paused_s: float
    requests_kept: int
    requests_aborted: int
    recomputed_tokens: int | None
    longest_wait_s: float | None
    discard_s: float | None

    @classmethod
    def of(cls, message: weights_pb2.Applied) -> "Applied":
        """From the wire."""
        return cls(
            previous_version=message.previous_version,
            active_version=message.active_version,
            step_s={timing.step: seconds_of(timing.duration) for timing in message.timings},
            paused_s=seconds_of(message.paused),  # unset, which reads as 0: it was paused before
            requests_kept=message.requests_kept,
            requests_aborted=message.requests_aborted,
            recomputed_tokens=message.recomputed_tokens if message.HasField("recomputed_tokens") else None,
            longest_wait_s=seconds_of(message.longest_wait) if message.HasField("longest_wait") else None,
            discard_s=seconds_of(message.discard) if message.HasField("discard") else None,
        )


@dataclass(frozen=True, slots=True)
class PushResult:
    """The outcome of a push. `applied` is None if nothing was applied."""

    push: Push
    applied: Applied | None
    state: EngineState
    message: Message = field(repr=False, compare=False)
    """The original message."""

    @classmethod
    def of(
        cls,
        message: weights_pb2.PushWeightsResponse
        | weights_pb2.LoadWeightsResponse
        | weights_pb2.GetPushResponse
        | weights_pb2.CommitPushResponse,
    ) -> "PushResult":
        """From the wire."""
        return cls(
            push=Push.of(message.push),
            applied=Applied.of(message.applied) if message.HasField("applied") else None,
            state=EngineState.of(message.state),
            message=message,
        )


@dataclass(frozen=True, slots=True)
class ServedTensor:
    """A tensor of the served checkpoint; `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The served weights. `digests` are SHA-256 in hex by (rank, name of vLLM's parameter), if requested. `resident`:
    whether the weights can be pulled, and used to complete partial pushes. `push_id`: the push that brought them, "" if
    none did; `content_digest`: SHA-256 of their contents, "" if it is not known."""

    weight_version: int
    tensors: list[ServedTensor]
    total_bytes: int
    manifest_digest: str
    digests: dict[tuple[str, str], str]
    resident: bool
    state: EngineState
    push_id: str = ""
    content_digest: str = ""

    @classmethod
    def of(cls, message: weights_pb2.GetWeightsResponse) -> "ServedWeights":
        """From the wire."""
        manifest = manifest_of(message.manifest)
        return cls(
            weight_version=message.weight_version,
            tensors=[ServedTensor(each.name, each.dtype, each.shape) for each in manifest.tensors],
            total_bytes=manifest.total_bytes,
            manifest_digest=manifest.digest,
            digests={(each.rank, each.name): each.sha256 for each in message.digests},
            resident=message.resident,
            state=EngineState.of(message.state),
            push_id=message.push_id,
            content_digest=message.content_digest,
        )

    def layout(self) -> Manifest:
        """Where the tensors lie in a push of several callers. Raises DtypeError."""
        return Manifest.end_to_end(
            (each.name, each.dtype, each.shape, math.prod(each.shape) * item_bytes(each.name, each.dtype))
            for each in self.tensors
        )
