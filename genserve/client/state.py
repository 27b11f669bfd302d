"""The engine as the control plane reports it: state, leases, load, what is served."""

from dataclasses import dataclass, field
from datetime import datetime

from google.protobuf.message import Message

from genserve.transport.fields import as_utc, utc_time, word_of
from genserve.v1 import control_pb2, types_pb2, weights_pb2
from genserve.wire.conversions import seconds_of


@dataclass(frozen=True, slots=True)
class PauseLease:
    """The right to keep the engine paused. `expire_time` (UTC, by the daemon's clock) is None if it never expires.
    `fleet_lease_id`: of the lease of a fleet that it is a part of, "" = none."""

    lease_id: str
    holder: str
    mode: str
    expire_time: datetime | None
    fleet_lease_id: str

    @classmethod
    def of(cls, message: types_pb2.PauseLease) -> "PauseLease":
        """From the wire."""
        mode = word_of(types_pb2.PauseMode, message.mode)
        return cls(message.lease_id, message.holder, mode, utc_time(message, "expire_time"), message.fleet_lease_id)


@dataclass(frozen=True, slots=True)
class Startup:
    """How far a start has come. `step` is what the daemon does now, for people, since `step_begin_time`; the start
    began at `begin_time`. Times are UTC, by the daemon's clock."""

    step: str
    step_begin_time: datetime
    begin_time: datetime

    @classmethod
    def of(cls, message: types_pb2.Startup) -> "Startup":
        """From the wire."""
        return cls(message.step, as_utc(message.step_begin_time), as_utc(message.begin_time))

    def described(self, now: datetime) -> str:
        """The step, and how long it and the steps before have taken, for people."""
        step_s, all_s = (max((now - each).total_seconds(), 0.0) for each in (self.step_begin_time, self.begin_time))
        since = f" ({all_s:.0f} s since the start)" if self.begin_time != self.step_begin_time else ""
        return f"{self.step}, for {step_s:.0f} s{since}"


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the engine is doing. `phase` is one of starting, running, paused, applying, tainted, sleeping, draining,
    dead.

    Running and waiting count sequences. `weight_version` is 0 before the first push. `asleep_tags` are the parts that
    are asleep, of scheduling, weights and kv_cache; pushes are accepted if weights is not among them.
    `weights_discarded`: a sleep of level 2 dropped the weights, and no version was applied since. `startup`: what the
    daemon does before it serves, None afterwards. `push_id` and `content_digest`: of the push that brought the served
    weights, "" = none did, or it is not known. `base_digest`: tells checkpoints apart that daemons have started with.
    `fleet_epoch`: of what the fleet of a daemon should be, as its router has written it down there, 0 = nothing.
    `router_address`: of the router that looks after the daemon, "" = none does.
    """

    instance_id: str
    weight_version: int
    phase: str
    pauses: list[PauseLease]
    running_requests: int
    waiting_requests: int
    asleep_tags: list[str] = field(default_factory=list)
    weights_discarded: bool = False
    startup: Startup | None = None
    push_id: str = ""
    content_digest: str = ""
    base_digest: str = ""
    fleet_epoch: int = 0
    router_address: str = ""

    @classmethod
    def of(cls, message: types_pb2.EngineState) -> "EngineState":
        """From the wire."""
        return cls(
            instance_id=message.instance_id,
            weight_version=message.weight_version,
            phase=word_of(types_pb2.Phase, message.phase),
            pauses=[PauseLease.of(lease) for lease in message.pauses],
            running_requests=message.running_requests,
            waiting_requests=message.waiting_requests,
            asleep_tags=list(message.asleep_tags),
            weights_discarded=message.weights_discarded,
            startup=Startup.of(message.startup) if message.HasField("startup") else None,
            push_id=message.push_id,
            content_digest=message.content_digest,
            base_digest=message.base_digest,
            fleet_epoch=message.fleet_epoch,
            router_address=message.router_address,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """The load of the engine. `kv_usage` and `prefix_cache_hit_rate` are in [0, 1]."""

    running: int
    waiting: int
    kv_usage: float
    tokens_per_second: float
    prefix_cache_hit_rate: float

    @classmethod
    def of(cls, message: control_pb2.Load) -> "Load":
        """From the wire."""
        return cls(
            running=message.running,
            waiting=message.waiting,
            kv_usage=message.kv_usage,
            tokens_per_second=message.tokens_per_second,
            prefix_cache_hit_rate=message.prefix_cache_hit_rate,
        )


@dataclass(frozen=True, slots=True)
class PushInFlight:
    """How far a push in flight has come. `state` is one of receiving, staged, preparing, prepared, applying, failed;
    one that is applied is not listed any more. `num_streams`: those that are open. `begin_time` and `state_time` (UTC,
    by the daemon's clock): when its present attempt and its present state began; None if the daemon does not tell."""

    push_id: str
    state: str
    weight_version: int
    received_bytes: int
    total_bytes: int
    lora_name: str
    num_streams: int
    begin_time: datetime | None
    state_time: datetime | None

    @classmethod
    def of(cls, message: weights_pb2.PushInFlight) -> "PushInFlight":
        """From the wire."""
        return cls(
            push_id=message.push_id,
            state=word_of(weights_pb2.PushState, message.state),
            weight_version=message.weight_version,
            received_bytes=message.received_bytes,
            total_bytes=message.total_bytes,
            lora_name=message.lora_name,
            num_streams=message.num_streams,
            begin_time=utc_time(message, "begin_time"),
            state_time=utc_time(message, "state_time"),
        )


@dataclass(frozen=True, slots=True)
class Status:
    """State, load, and the pushes in flight. `time`: the server's clock (UTC), to which the times of leases and
    pushes refer; None if the server does not send it."""

    state: EngineState
    load: Load
    pushes: list[PushInFlight]
    time: datetime | None = field(compare=False)
    message: Message = field(repr=False, compare=False)
    """The original message."""

    @classmethod
    def of(cls, message: control_pb2.GetStatusResponse | control_pb2.WatchStatusResponse) -> "Status":
        """From the wire."""
        return cls(
            EngineState.of(message.state),
            Load.of(message.load),
            [PushInFlight.of(push) for push in message.pushes],
            utc_time(message, "time"),
            message,
        )


@dataclass(frozen=True, slots=True)
class PauseResult:
    """A lease, and how many requests were kept and ended."""

    lease: PauseLease
    requests_kept: int
    requests_aborted: int
    state: EngineState


@dataclass(frozen=True, slots=True)
class ResumeResult:
    """The state after a resume. If `lease_expired`, the engine may have run before this call."""

    lease_expired: bool
    state: EngineState


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of requests, in bytes and tokens; of connections to a port, and of running calls on one of them
    (`max_streams`). `request_rates`: calls per second of all callers of a role together, by role.

    `max_active_requests`: running and waiting sequences, above which requests are refused; `max_n`: those of one
    request; 0 where the daemon is too old to tell them. `write_timeout_s`: time that a client may take to read a
    message of tokens, None = any.
    """

    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
    max_message_bytes: int
    max_staging_bytes: int
    max_connections: int
    max_streams: int
    max_metadata_bytes: int
    request_rates: dict[str, float]
    max_active_requests: int
    max_n: int
    write_timeout_s: float | None

    @classmethod
    def of(cls, message: control_pb2.Limits) -> "Limits":
        """From the wire."""
        return cls(
            max_model_len=message.max_model_len,
            max_num_seqs=message.max_num_seqs,
            max_logprobs=message.max_logprobs,
            max_message_bytes=message.max_message_bytes,
            max_staging_bytes=message.max_staging_bytes,
            max_connections=message.max_connections,
            max_streams=message.max_streams,
            max_metadata_bytes=message.max_metadata_bytes,
            request_rates={each.role: each.calls_per_second for each in message.request_rates},
            max_active_requests=message.max_active_requests,
            max_n=message.max_n,
            write_timeout_s=seconds_of(message.write_timeout) if message.HasField("write_timeout") else None,
        )


@dataclass(frozen=True, slots=True)
class Protection:
    """The protection of the ports. Without `roles` every connection may make every call."""

    tls: bool
    client_certificates_required: bool
    roles: bool

    @classmethod
    def of(cls, message: control_pb2.Protection) -> "Protection":
        """From the wire."""
        return cls(message.tls, message.client_certificates_required, message.roles)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory that the model reached after loading, of all ranks together, in bytes: what a push exchanges, the KV
    cache, what is constant, and the rest, which should be 0."""

    reachable_bytes: int
    exchanged_bytes: int
    kv_cache_bytes: int
    constant_bytes: int
    hidden_bytes: int

    @classmethod
    def of(cls, message: control_pb2.ModelMemory) -> "ModelMemory":
        """From the wire."""
        return cls(
            reachable_bytes=message.reachable_bytes,
            exchanged_bytes=message.exchanged_bytes,
            kv_cache_bytes=message.kv_cache_bytes,
            constant_bytes=message.constant_bytes,
            hidden_bytes=message.hidden_bytes,
        )


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the daemon serves and supports.

    `versions` are by component (genserve, vllm, torch, grpc, python). `weight_update` is how a new version is taken
    (beside, host or inplace), and `weight_update_reason` is why; `reserved_device_bytes` and `pinned_host_bytes` are
    the memory reserved for it. `model_memory`: what the model reaches. `weight_transfer`: backend of vLLM's own
    transfer, "" without one. `logprobs_mode`: what log-probabilities mean, as vLLM's --logprobs-mode names it.
    `model_runner`: the part of vLLM that computes steps, v1 or v2; "" from an older daemon.
    `frontend_ports`: of the processes that serve requests beside the daemon, and `num_frontends_down` those that ended
    again and again. `openai_port`: of vLLM's OpenAI server on the daemon's host, 0 without one. `protection`: of the
    ports of gRPC.
    """

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    device: str
    limits: Limits
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    features: list[str]
    versions: dict[str, str]
    weight_update: str
    weight_update_reason: str
    reserved_device_bytes: int
    pinned_host_bytes: int
    model_memory: ModelMemory
    weight_transfer: str
    logprobs_mode: str
    model_runner: str
    frontend_ports: list[int]
    num_frontends_down: int
    openai_port: int
    protection: Protection
    state: EngineState

    @classmethod
    def of(cls, message: control_pb2.GetServerInfoResponse) -> "ServerInfo":
        """From the wire."""
        return cls(
            model=message.model,
            architecture=message.architecture,
            dtype=message.dtype,
            vocab_size=message.vocab_size,
            device=message.device,
            limits=Limits.of(message.limits),
            tensor_parallel_size=message.parallelism.tensor_parallel_size,
            pipeline_parallel_size=message.parallelism.pipeline_parallel_size,
            data_parallel_size=message.parallelism.data_parallel_size,
            features=list(message.features),
            versions={each.component: each.version for each in message.versions},
            weight_update=message.weight_update,
            weight_update_reason=message.weight_update_reason,
            reserved_device_bytes=message.reserved_device_bytes,
            pinned_host_bytes=message.pinned_host_bytes,
            model_memory=ModelMemory.of(message.model_memory),
            weight_transfer=message.weight_transfer,
            logprobs_mode=message.logprobs_mode,
            model_runner=message.model_runner,
            frontend_ports=list(message.frontend_ports),
            openai_port=message.openai_port,
            num_frontends_down=message.num_frontends_down,
            protection=Protection.of(message.protection),
            state=EngineState.of(message.state),
        )
