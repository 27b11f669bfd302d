"""Messages of ControlService to and from domain types."""

import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf.message import Message

import genserve
from genserve.control.asleep import SleepDepth
from genserve.control.membership import FleetRecord
from genserve.control.state import EngineState
from genserve.engine.types import EngineInfo, Load, LoadedLora, PauseMode
from genserve.errors import InvalidFieldError
from genserve.rpc.convert.listening import NOWHERE, ListeningFacts, set_listening
from genserve.rpc.convert.values import PAUSE_MODES, member_of, seconds_or, to_state, to_timestamp
from genserve.rpc.convert.weights import to_push_in_flight
from genserve.v1 import control_pb2, types_pb2
from genserve.weights.kept.directory import KeptRecord
from genserve.weights.push.types import PushInFlight
from genserve.wire.bounds import MIN_WATCH_INTERVAL_S

StatusT = TypeVar("StatusT", control_pb2.GetStatusResponse, control_pb2.WatchStatusResponse)

MAX_FLEET_STATE_BYTES = 256 << 10
DEFAULT_PAUSE_TIMEOUT_S = 60.0
DEFAULT_LOAD_TIMEOUT_S = 60.0
DEFAULT_WATCH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the daemon reports of itself, in addition to the engine's facts. Sizes are bytes."""

    model: str
    max_message_bytes: int
    max_staging_bytes: int
    max_active_requests: int
    features: Sequence[str]
    host_id: str = ""
    ingest_ports: Sequence[int] = ()
    frontend_ports: Sequence[int] = ()
    num_frontends_down: int = 0
    openai_port: int = 0
    listening: ListeningFacts = NOWHERE


def fleet_record(message: types_pb2.FleetState) -> FleetRecord:
    """What a router has written down. Raises InvalidFieldError."""
    if not message.epoch:
        raise InvalidFieldError.of("fleet.epoch", "must be above 0")
    if (size := message.ByteSize()) > MAX_FLEET_STATE_BYTES:
        raise InvalidFieldError.of("fleet", f"has {size} bytes, at most {MAX_FLEET_STATE_BYTES} are kept")
    return FleetRecord(message.epoch, message.SerializeToString(), message.weight_version, message.push_id)


def kept_fleet_record(kept: KeptRecord, base_digest: str) -> FleetRecord:
    """What is left of the fleet's record on a disk: that it has served this version, and in which epoch. Leases and
    sleep have ended with the process."""
    return fleet_record(
        types_pb2.FleetState(
            epoch=kept.fleet_epoch,
            weight_version=kept.weight_version,
            push_id=kept.push_id,
            content_digest=kept.content_digest,
            base_digest=base_digest,
        )
    )


def sleep_arguments(message: control_pb2.SleepRequest) -> tuple[PauseMode, SleepDepth, float]:
    """Mode, parts to release, and timeout in seconds of a Sleep, with defaults."""
    timeout_s = seconds_or(message, "timeout", DEFAULT_PAUSE_TIMEOUT_S)
    depth = SleepDepth.of(message.level if message.HasField("level") else None, message.tags)
    return member_of(PAUSE_MODES, message.mode, "mode"), depth, timeout_s


def load_timeout_s(message: control_pb2.LoadLoraRequest) -> float:
    """Seconds that loading may take."""
    return seconds_or(message, "timeout", DEFAULT_LOAD_TIMEOUT_S)


def drain_timeout_s(message: control_pb2.DrainRequest) -> float | None:
    """Seconds for what runs; None = as the flags say."""
    return seconds_or(message, "drain_timeout", None)


def renewed_ttl_s(message: control_pb2.RenewPauseRequest) -> float | None:
    """Seconds from now; None = the lease's first time to live."""
    return seconds_or(message, "ttl", None)


def watch_interval_s(message: control_pb2.WatchStatusRequest) -> float:
    """Seconds between two checks of the load."""
    return watch_seconds(message, "interval", DEFAULT_WATCH_INTERVAL_S)


def watch_heartbeat_s(message: control_pb2.WatchStatusRequest) -> float:
    """Seconds after which a message is sent though nothing has changed; inf = never."""
    return watch_seconds(message, "heartbeat", math.inf)


def watch_seconds(message: Message, field: str, default_s: float) -> float:
    """Seconds between two messages to a watcher. Raises InvalidFieldError if they are too few."""
    seconds = seconds_or(message, field, default_s)
    if seconds < MIN_WATCH_INTERVAL_S:
        raise InvalidFieldError.of(field, f"must be at least {MIN_WATCH_INTERVAL_S} s, is {seconds:g} s")
    return seconds


def to_load(load: Load) -> control_pb2.Load:
    """The load."""
    return control_pb2.Load(
        running=load.running,
        waiting=load.waiting,
        kv_usage=load.kv_usage,
        tokens_per_second=load.tokens_per_second,
        prefix_cache_hit_rate=load.prefix_cache_hit_rate,
    )


def to_status(kind: type[StatusT], state: EngineState, pushes: Iterable[PushInFlight], now_s: float) -> StatusT:
    """The status, as GetStatus and WatchStatus return it at `now_s`, in Unix seconds."""
    return kind(
        state=to_state(state), load=to_load(state.load), pushes=map(to_push_in_flight, pushes), time=to_timestamp(now_s)
    )


def to_lora(lora: LoadedLora) -> control_pb2.Lora:
    """An adapter."""
    return control_pb2.Lora(
        lora_name=lora.name,
        rank=lora.rank,
        size_bytes=lora.size_bytes,
        source=lora.source,
        load_time=to_timestamp(lora.loaded_at_s),
        running_requests=lora.num_requests,
        lora_version=lora.version,
    )


def to_server_info(info: EngineInfo, facts: ServerFacts, state: EngineState) -> control_pb2.GetServerInfoResponse:
    """What is served."""
    versions = {
        "genserve": genserve.__version__,
        **info.versions,
        "grpc": grpc.__version__,
        "python": platform.python_version(),
    }
    answer = control_pb2.GetServerInfoResponse(
        model=facts.model,
        architecture=info.architecture,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        device=info.device,
        weight_update=info.weight_update,
        weight_update_reason=info.weight_update_reason,
        reserved_device_bytes=info.reserved_device_bytes,
        pinned_host_bytes=info.pinned_host_bytes,
        model_memory=control_pb2.ModelMemory(
            reachable_bytes=info.model_memory.reachable_bytes,
            exchanged_bytes=info.model_memory.exchanged_bytes,
            kv_cache_bytes=info.model_memory.kv_cache_bytes,
            constant_bytes=info.model_memory.constant_bytes,
            hidden_bytes=info.model_memory.hidden_bytes,
        ),
        weight_transfer=info.weight_transfer,
        logprobs_mode=info.logprobs_mode,
        model_runner=info.model_runner,
        host_id=facts.host_id,
        ingest_ports=facts.ingest_ports,
        frontend_ports=facts.frontend_ports,
        openai_port=facts.openai_port,
        num_frontends_down=facts.num_frontends_down,
        limits=control_pb2.Limits(
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            max_logprobs=info.max_logprobs,
            max_message_bytes=facts.max_message_bytes,
            max_staging_bytes=facts.max_staging_bytes,
            max_active_requests=facts.max_active_requests,
            max_n=info.max_n,
        ),
        parallelism=control_pb2.Parallelism(
            tensor_parallel_size=info.tensor_parallel_size,
            pipeline_parallel_size=info.pipeline_parallel_size,
            data_parallel_size=info.data_parallel_size,
        ),
        features=facts.features,
        versions=[control_pb2.ComponentVersion(component=c, version=v) for c, v in versions.items()],
        state=to_state(state),
    )
    set_listening(answer, facts.listening)
    return answer
