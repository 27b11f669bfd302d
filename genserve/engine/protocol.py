"""What the rest of the daemon knows of an engine: the protocol. `types` and `generation` have the types that cross it.

`engine.vllm` implements it on AsyncLLM. A router over replicas can implement it as well, and the servicers serve both.
"""

from collections.abc import Callable, Sequence, Set, Sized
from typing import Protocol

from genserve.engine.generation import ChatPrompt, GenerationRequest, GenerationUpdate, TextPrompt
from genserve.engine.types import (
    ArenaRef,
    DigestedWeights,
    EngineInfo,
    KvPolicy,
    Load,
    LoadedLora,
    PauseCounts,
    PauseMode,
    SleepTag,
)
from genserve.tensors.manifest import TensorSpec


class GenerationStream(Protocol):
    """An admitted request."""

    @property
    def request_id(self) -> str:
        """Its id, generated if the request had none."""

    @property
    def is_finished(self) -> bool:
        """Whether the last update was taken, the request failed, or it was closed."""

    def take(self) -> GenerationUpdate | None:
        """All that is new, or None if nothing is. What is not taken in time is merged, never lost. Raises the error
        that ended the request."""

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """From now on calls `callback`, on the event loop, when there is something to take, once until it is taken; and
        at once if there is something now."""

    def abort(self) -> None:
        """Ends the request soon with reason ABORTED. What it has produced is still there to take."""

    async def close(self) -> None:
        """Ends the request if it still runs; safe to call more than once."""


class Weights(Protocol):
    """The weights of an engine. Every method raises as those of `Engine`."""

    @property
    def version(self) -> int:
        """Version of the weights served; 0 before the first push."""

    async def prepare(self, nonce: str, arena: ArenaRef, tensors: Sequence[TensorSpec], timeout_s: float) -> None:
        """Builds the version `nonce` beside the live one on every rank, while generation runs. If a rank fails, raises
        PushRolledBackError, and nothing is left of the attempt. Bytes may still arrive if it `takes_arriving`:
        `discard` ends the wait for them."""

    @property
    def takes_arriving(self) -> bool:
        """Whether a version can be prepared while its bytes arrive: all workers are on this host."""

    async def commit(self, nonce: str, version: int, timeout_s: float) -> None:
        """Exchanges live and prepared weights on every rank and labels later tokens `version`. Call it while paused.

        If a rank fails, all ranks exchange back: PushRolledBackError, or EngineTaintedError if this cannot be proven.
        They also exchange back if it takes longer than `timeout_s`: DeadlineError; but an update in place completes
        late. If a rank hangs, the engine is given up a while after `timeout_s`: EngineDeadError.
        """

    async def discard(self, nonce: str, timeout_s: float) -> None:
        """Frees the memory of a prepared version, or of the one that a commit replaced."""

    async def unused_tensors(self, tensors: Sequence[TensorSpec], timeout_s: float) -> frozenset[str]:
        """The names of those tensors of the checkpoint that no rank loads, without which a version is complete. Call it
        before anything is served."""

    async def digests(self, timeout_s: float) -> DigestedWeights:
        """Reads on in the live weights for a moment, between two steps. Call it until all are read; what was read
        before they changed does not count. From then on it answers at once, until they or the adapters change."""


class WeightTransfer(Protocol):
    """vLLM's own weight transfer: its engines receive tensors from a trainer over the live ones. `info` is vLLM's JSON
    text.

    All methods but `init` may be called only while nothing is scheduled. Between `start` and `finish` the live weights
    are inconsistent: `abandon` ends this state, and then a version must be prepared and committed. Every method raises
    GenserveError for an error of vLLM's on a rank, and DeadlineError if it takes longer than `timeout_s`. A rank that
    hangs ends the engine: EngineDeadError.
    """

    async def init(self, info: str, timeout_s: float) -> None:
        """Connects every rank to the trainer."""

    async def start(self, timeout_s: float) -> None:
        """Prepares every rank to receive."""

    async def update(self, info: str, timeout_s: float) -> None:
        """Makes every rank receive tensors."""

    async def finish(self, version: int, timeout_s: float) -> None:
        """Makes what was received live, and labels later tokens `version`."""

    async def abandon(self, timeout_s: float) -> None:
        """Ends an update that was not finished."""


class LoraDirectory(Protocol):
    """A LoRA adapter in a directory, in PEFT's format. `size_bytes` of its tensors; `source` is for people; `push_id`
    of the push that brought it, "" if none did."""

    directory: str
    rank: int
    size_bytes: int
    source: str
    push_id: str

    def close(self) -> None:
        """Removes the directory."""


class Loras(Protocol):
    """The LoRA adapters of an engine. Replaced or unloaded ones are kept until their requests have ended."""

    async def load(self, name: str, files: LoraDirectory, timeout_s: float, version: int = 0) -> LoadedLora:
        """Loads an adapter on every rank while generation runs; later requests that name it use it, and their spans
        have its version: 0 = the next one after that of the adapter which it replaces. Closes `files` when they are not
        needed any more.

        Raises StagingFullError if the workers hold as many adapters as they can, PushRolledBackError with vLLM's error,
        and ManifestMismatchError if a part of the adapter reached no layer. After these errors, and after
        DeadlineError, the previous adapter is still loaded.
        """

    def unload(self, name: str) -> LoadedLora:
        """Makes an adapter unavailable to later requests. Raises LoraNotFoundError."""

    def loaded(self) -> list[LoadedLora]:
        """The adapters that later requests can use, in order of their names."""


class GeneratingEngine(Protocol):
    """What a process needs to serve requests for tokens. Every method raises EngineDeadError if the engine dies."""

    @property
    def info(self) -> EngineInfo:
        """What it serves."""

    async def submit(self, request: GenerationRequest) -> GenerationStream:
        """Admits a request, or raises its error."""

    async def abort(self, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        """Ends requests (None = all) with reason ABORTED; returns the ids that ran and those that did not."""

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt."""

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids."""


class Interruption(Protocol):
    """What a pause costs the sequences that it interrupts: those of all clients that have had output."""

    @property
    def num_computed_tokens(self) -> int | None:
        """Tokens that they had keys and values of; None until every client has reported its part."""

    async def told(self) -> None:
        """Returns when every client has."""

    async def longest_wait_s(self) -> float | None:
        """Returns when each of them has had another output or has ended, at the latest after a few minutes or at the
        next interruption. The longest time, in seconds, that one was without output; None if none was. Raises
        EngineDeadError."""


class Engine(GeneratingEngine, Protocol):
    """A generation engine whose weights can be exchanged.

    Every method raises EngineDeadError if the engine dies meanwhile, and DeadlineError if `timeout_s` ends. If the
    caller gives up a call, the engine continues it; `settled` tells when it has ended.
    """

    async def wait_dead(self) -> None:
        """Returns when the engine has died."""

    @property
    def cause_of_death(self) -> str:
        """Why it is dead, for people; "" while it lives."""

    @property
    def settling(self) -> Sized:
        """The calls that have not ended and for which the next one would have to wait."""

    async def settled(self) -> None:
        """Returns when they have ended, or the engine is dead."""

    async def wait_idle(self) -> None:
        """Returns when no request is left."""

    def load(self) -> Load:
        """The present load."""

    async def pause(self, mode: PauseMode, kv_policy: KvPolicy, timeout_s: float) -> PauseCounts:
        """Stops scheduling. After an error the engine may be stopped or running, and the caller restores it."""

    def interrupted(self) -> Interruption:
        """What the present pause interrupts. Call it while paused, when the outputs from before have been read: a while
        after `pause`."""

    async def resume(self, timeout_s: float) -> None:
        """Schedules again, within `timeout_s` from when the engine is settled: an engine that runs in lockstep with
        others must first finish a pause that was given up."""

    async def sleep(self, level: int, tags: Set[SleepTag], timeout_s: float) -> None:
        """Releases the memory of the tags. Call it while paused. Level 1 keeps the weights on the host, level 2 drops
        them. After an error they may be asleep or awake, and the caller wakes them up."""

    async def wake_up(self, tags: Set[SleepTag], timeout_s: float, *, paused: bool = False) -> None:
        """Allocates the memory of the tags. If SCHEDULING is among them, everything else is awake, and the engine
        schedules, or with `paused` stays paused without a step in between. Otherwise some memory stays asleep, and the
        engine does not schedule. Dropped weights have no valid contents then."""

    async def reset_prefix_cache(self, reset_running_requests: bool, timeout_s: float) -> bool:
        """Drops the prefix cache. Returns whether it was dropped."""

    async def reset_caches(self, timeout_s: float) -> None:
        """Drops everything that was computed from the live weights: keys and values, also of running requests and in
        connectors, and embeddings of images. Call it while paused. Raises GenserveError if something could not be
        dropped."""

    @property
    def weights(self) -> Weights:
        """Its weights."""

    @property
    def transfer(self) -> WeightTransfer:
        """vLLM's own weight transfer, if `info.weight_transfer` names a backend."""

    @property
    def loras(self) -> Loras:
        """Its LoRA adapters, if `info.max_loras` is not 0."""
