"""What the rest of the daemon knows of an engine: the protocol and the types that cross it.

Owns no behaviour. `engine.vllm` implements it on AsyncLLM; a router over replicas can implement it as well, and the
servicers serve both.
"""

import enum
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from genserve.engine.generation import ChatPrompt, GenerationRequest, GenerationUpdate, TextPrompt
from genserve.tensors.manifest import TensorSpec


class PauseMode(enum.Enum):
    """What happens to requests in flight at a pause."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class KvPolicy(enum.Enum):
    """What happens to keys and values computed before a pause."""

    REUSE = "reuse"
    RECOMPUTE = "recompute"


class GenerationStream(Protocol):
    """An admitted request."""

    @property
    def request_id(self) -> str:
        """Its id, minted when the request had none."""

    @property
    def is_finished(self) -> bool:
        """Whether the last update was taken, or the request has failed or was closed."""

    async def next(self) -> GenerationUpdate | None:
        """The next update, or None after the last. Updates that were not fetched in time are merged, never lost.
        Raises what ended the request."""

    def take(self) -> GenerationUpdate | None:
        """`next` without waiting: None when there is nothing now."""

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """From now on `callback` is called, on the event loop, whenever something has come that can be taken; also at
        once if there is something. For a reader of many streams, who never calls `next`."""

    async def close(self) -> None:
        """Ends the request if it still runs; safe to call more than once."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes that the model reaches, of all ranks together, when it has been loaded: `exchanged` by a push, the KV
    cache, `constant`, which no version changes, and `hidden`, which should be 0. Once each; memory that torch does not
    know, such as weights that oneDNN has packed, is not in them."""

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
    `max_loras`: adapters that workers can hold, 0 = none;
    `weight_transfer`: backend of vLLM's own transfer, "" without one; `logprobs_mode`: as vLLM's --logprobs-mode names
    it; `can_sleep`: it can give its memory back."""

    model: str
    architecture: str
    dtype: str
    vocab_size: int
    device: str
    max_model_len: int
    max_num_seqs: int
    max_logprobs: int
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

    @property
    def max_request_bytes(self) -> int:
        """Size above which no honest request of generation comes: 64 bytes for each token of the context, and at least
        4 MiB."""
        return max(4 << 20, 64 * self.max_model_len)


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine has to do: sequences, share of the KV cache, output tokens per second, share of prompt tokens
    found in the prefix cache."""

    running: int
    waiting: int
    kv_usage: float
    tokens_per_second: float
    prefix_cache_hit_rate: float


class SleepTag(enum.Enum):
    """A part of the engine that a sleep stops or gives back; the values are vLLM's tags, and the wire's. `SCHEDULING`
    takes no memory: it is asleep whenever anything is."""

    SCHEDULING = "scheduling"
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


MEMORY_TAGS = frozenset({SleepTag.WEIGHTS, SleepTag.KV_CACHE})
"""What takes memory."""
ALL_TAGS = frozenset(SleepTag)


@dataclass(frozen=True, slots=True)
class PauseCounts:
    """Requests that a pause froze and that it ended."""

    kept: int
    aborted: int


@dataclass(frozen=True, slots=True)
class ArenaRef:
    """Where workers find a version's bytes: a file they can map, and its size in bytes. On other hosts they pull the
    bytes of the push `push_id`, or the served ones where that is empty."""

    path: str
    size_bytes: int
    push_id: str = ""


@dataclass(frozen=True, slots=True)
class WeightDigest:
    """SHA-256 (hex) of one live tensor on one rank ("dp0:pp0:pcp0:tp0")."""

    rank: str
    name: str
    sha256: str


class WeightTransfer(Protocol):
    """vLLM's own weight transfer: its engines receive tensors from a trainer over the live ones.

    `info` is JSON text of what vLLM takes. All but `init` only while nothing is scheduled. Between `start` and `finish`
    the live weights are no version: `abandon` ends that, and then one has to be prepared and committed over them. Every
    method raises GenserveError for what vLLM raises on a rank, and DeadlineError when it took longer than `timeout_s`;
    a rank that hangs is the end of the engine: EngineDeadError, a while after `timeout_s`.
    """

    async def init(self, info: str, timeout_s: float) -> None:
        """Connects every rank with the trainer."""

    async def start(self, timeout_s: float) -> None:
        """Gets every rank ready to receive."""

    async def update(self, info: str, timeout_s: float) -> None:
        """Has every rank receive tensors."""

    async def finish(self, version: int, timeout_s: float) -> None:
        """Makes what was received live, and labels later tokens `version`."""

    async def abandon(self, timeout_s: float) -> None:
        """Ends an update that was not finished."""


class LoraFiles(Protocol):
    """A LoRA adapter in a directory, as PEFT saves one; `size_bytes` of its tensors, `source` is for people."""

    directory: str
    rank: int
    size_bytes: int
    source: str

    def close(self) -> None:
        """Takes the directory away."""


@dataclass(frozen=True, slots=True)
class LoadedLora:
    """An adapter that requests can use; `loaded_at_s` in seconds of the epoch."""

    name: str
    rank: int
    size_bytes: int
    source: str
    loaded_at_s: float
    num_requests: int


class Loras(Protocol):
    """The LoRA adapters of an engine. Those that were replaced or unloaded are held until their requests have ended."""

    async def load(self, name: str, files: LoraFiles, timeout_s: float) -> LoadedLora:
        """Loads one on every rank, beside generation; requests that come later and name it use it. Closes `files` when
        they are not needed any more. Raises StagingFullError when workers hold as many as they can, and
        PushRolledBackError for what vLLM finds wrong: what was there before is there still. So it is after
        DeadlineError."""

    def unload(self, name: str) -> LoadedLora:
        """Later requests cannot use it. Raises LoraNotFoundError."""

    def loaded(self) -> list[LoadedLora]:
        """What later requests can use, in order of the names."""


class Engine(Protocol):
    """A generation engine with weights that can be exchanged.

    Every method raises EngineDeadError when the engine dies meanwhile, and DeadlineError when `timeout_s` runs out. A
    call that its caller gives up goes on in the engine; `settled` tells when it has ended.
    """

    @property
    def info(self) -> EngineInfo:
        """What it serves."""

    @property
    def weight_version(self) -> int:
        """Version of the weights served; 0 before the first push."""

    async def wait_dead(self) -> None:
        """Returns when the engine has died."""

    @property
    def is_settled(self) -> bool:
        """Whether every call has ended that the next one would have to wait for."""

    async def settled(self) -> None:
        """Returns when they have, or the engine is dead."""

    async def wait_idle(self) -> None:
        """Returns when no request is left."""

    async def submit(self, request: GenerationRequest) -> GenerationStream:
        """Admits a request, or raises what is wrong with it."""

    async def abort(self, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        """Ends requests (None = all) with reason ABORTED; returns the ids that ran and those that did not."""

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt."""

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids."""

    def load(self) -> Load:
        """What it has to do now."""

    async def pause(self, mode: PauseMode, kv_policy: KvPolicy, timeout_s: float) -> PauseCounts:
        """Stops scheduling. After an error it may stand still or run: whoever called puts it back."""

    async def resume(self, timeout_s: float) -> None:
        """Schedules again, within `timeout_s` from when the engine is settled: one that runs in lockstep with others
        cannot leave a pause that was given up before that has taken hold."""

    async def sleep(self, level: int, tags: Set[SleepTag], timeout_s: float) -> None:
        """Gives back what of the memory the tags name; call while paused. Weights are kept on the host at level 1, and
        dropped at level 2. After an error they may be asleep or not: whoever called wakes them up."""

    async def wake_up(self, tags: Set[SleepTag], timeout_s: float, *, paused: bool = False) -> None:
        """Takes back what the tags name. With SCHEDULING it is all that sleeps, and the engine schedules, or with
        `paused` stands still without a step in between; without, some of the memory stays asleep, and it does not.
        Weights that were dropped are of no version then."""

    async def reset_prefix_cache(self, reset_running_requests: bool, timeout_s: float) -> bool:
        """Drops the prefix cache; whether it is dropped."""

    async def reset_caches(self, timeout_s: float) -> None:
        """Drops all that the live weights have computed: keys and values, also of running requests and in connectors,
        and embeddings of images. Call while paused; raises GenserveError for what could not be dropped."""

    async def prepare_weights(
        self, nonce: str, arena: ArenaRef, tensors: Sequence[TensorSpec], timeout_s: float
    ) -> None:
        """Builds the version `nonce` beside the live one on every rank, while generation goes on. When any rank fails
        it raises PushRolledBackError and nothing is left of the attempt."""

    async def commit_weights(self, nonce: str, version: int, timeout_s: float) -> None:
        """Exchanges live and prepared weights on every rank and labels later tokens `version`. Call while paused. When
        any rank fails, all are exchanged back: PushRolledBackError, or EngineTaintedError if that cannot be proven. So
        they are when it took longer than `timeout_s`: DeadlineError, unless weights are updated in place, where late is
        done. When it hangs the engine is given up:
        EngineDeadError, a while after `timeout_s`."""

    async def discard_weights(self, nonce: str, timeout_s: float) -> None:
        """Frees what a prepared version, or the one that a commit replaced, still holds."""

    @property
    def transfer(self) -> WeightTransfer:
        """vLLM's own weight transfer, where `info.weight_transfer` names a backend."""

    @property
    def loras(self) -> Loras:
        """Its LoRA adapters, where `info.max_loras` is not 0."""

    async def weight_digests(self, timeout_s: float) -> list[WeightDigest]:
        """Digests of every live tensor on every rank."""
