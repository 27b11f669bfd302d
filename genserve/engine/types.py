"""The types that cross the Engine protocol, apart from requests and their results, which are in `generation`. No
behaviour."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class PauseMode(enum.Enum):
    """What happens to requests in flight at a pause."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class KvPolicy(enum.Enum):
    """What happens to keys and values computed before a pause."""

    REUSE = "reuse"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes that the loaded model reaches, of all ranks together: `exchanged` by a push, the KV cache, `constant`,
    which no version changes, and `hidden`, which should be 0. Each byte counts once. Memory that torch does not know,
    such as weights that oneDNN packed, is not included."""

    reachable_bytes: int = 0
    exchanged_bytes: int = 0
    kv_cache_bytes: int = 0
    constant_bytes: int = 0
    hidden_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine serves. `tensor_parallel_size` and so on are numbers of ranks; `device` is cpu or cuda;
    `weight_update`: beside, host or inplace, and `weight_update_reason` says why; `reserved_device_bytes`: kept
    for pushes, the most of any worker; `pinned_host_bytes`: through which they reach the device, the least of any;
    `max_n`: sequences of one request at most; `max_loras`: adapters that workers can hold, 0 = none;
    `weight_transfer`: backend of vLLM's own transfer, "" without one; `logprobs_mode`: as vLLM's --logprobs-mode names
    it; `can_sleep`: it can give its memory back; `model_runner`: the one of vLLM's that its workers have, v1 or v2."""

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    device: str
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
    max_n: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    versions: Mapping[str, str]
    weight_update: str = ""
    weight_update_reason: str = ""
    reserved_device_bytes: int = 0
    pinned_host_bytes: int = 0
    model_memory: ModelMemory = ModelMemory()
    max_loras: int = 0
    max_lora_rank: int = 0
    weight_transfer: str = ""
    logprobs_mode: str = ""
    can_sleep: bool = True
    model_runner: str = ""

    @property
    def max_request_bytes(self) -> int:
        """Size above which no honest generation request exists: 64 bytes for each token of the context, and at least 4
        MiB."""
        return max(4 << 20, 64 * self.max_model_len)


@dataclass(frozen=True, slots=True)
class Load:
    """The load of the engine: sequences, share of the KV cache, output tokens per second, share of prompt tokens found
    in the prefix cache."""

    running: int
    waiting: int
    kv_usage: float
    tokens_per_second: float
    prefix_cache_hit_rate: float


class SleepTag(enum.Enum):
    """A part of the engine that a sleep stops or releases. The values are vLLM's tags, and those on the wire.
    `SCHEDULING` uses no memory: it is asleep whenever another part is."""

    SCHEDULING = "scheduling"
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


MEMORY_TAGS = frozenset({SleepTag.WEIGHTS, SleepTag.KV_CACHE})
"""The parts that use memory."""
ALL_TAGS = frozenset(SleepTag)


@dataclass(frozen=True, slots=True)
class PauseCounts:
    """Requests that a pause froze, with those that are being admitted, and that it ended."""

    kept: int
    aborted: int


WAIT_PATIENCE_S = 300.0
"""How long sequences that a pause interrupted are watched for their next output."""


@dataclass(frozen=True, slots=True)
class UsedAdapter:
    """A LoRA adapter as vLLM needs it for a request: its name and id there, and the directory of its files. `version`:
    of the adapter, for the request's spans."""

    unique_name: str
    lora_id: int
    directory: str
    version: int


@dataclass(frozen=True, slots=True)
class ArenaRef:
    """Where workers find the bytes of a version: a file that they can map, and its size in bytes. Workers on other
    hosts pull the bytes of the push `push_id`, or the served bytes if it is empty. `arrival_path`: the
    memory.arena.Arrival of bytes that are still arriving; "" if all of them are there."""

    path: str
    size_bytes: int
    push_id: str = ""
    arrival_path: str = ""


@dataclass(frozen=True, slots=True)
class WeightDigest:
    """SHA-256 (hex) of one live tensor on one rank ("dp0:pp0:pcp0:tp0")."""

    rank: str
    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class DigestedWeights:
    """How far the live weights are read: `digests` of every tensor on every rank when they are, None before. `spent_s`:
    how long the last part kept the engine from its next step."""

    digests: Sequence[WeightDigest] | None
    spent_s: float


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """An adapter that requests can use; `loaded_at_s` in seconds of the epoch; `push_id` of the push that brought it,
    "" if none did. `directory` has its files for as long as it is loaded."""

    name: str
    version: int
    rank: int
    size_bytes: int
    source: str
    push_id: str
    loaded_at_s: float
    num_requests: int
    directory: str
