"""An engine that does as it is told: for the timing of edges that a real one does not stop at.

It keeps the truth that tests check: whether it runs, which bytes are live, and whether it was driven in a way that a
real engine would not survive.
"""

import asyncio
import json
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from genserve.engine.generation import ChatPrompt, GenerationRequest, TextPrompt
from genserve.engine.protocol import GenerationStream, LoraDirectory
from genserve.engine.types import (
    MEMORY_TAGS,
    ArenaRef,
    DigestedWeights,
    EngineInfo,
    KvPolicy,
    Load,
    LoadedLora,
    PauseCounts,
    PauseMode,
    SleepTag,
    WeightDigest,
)
from genserve.errors import DeadlineError, LoraNotFoundError
from genserve.memory.arena import ArrivedBytes, map_arena
from genserve.tensors.manifest import TensorSpec


@dataclass
class Gate:
    """Holds a step up: `reached` is set when the engine is at it, and it goes on when `open` is."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)
    open: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedWeights:
    """What is prepared is what lies in the arena. Steps are named prepare_weights, commit_weights, discard_weights and
    weight_digests."""

    def __init__(self, engine: "ScriptedEngine") -> None:
        self._engine = engine
        self.takes_arriving = False

    @property
    def version(self) -> int:
        return self._engine.weight_version

    async def prepare(self, nonce: str, arena: ArenaRef, tensors: Sequence[TensorSpec], timeout_s: float) -> None:
        await self._engine.step("prepare_weights", "prepare_weights", timeout_s)
        mapped = map_arena(arena.path, arena.size_bytes)
        if arena.arrival_path:
            with ArrivedBytes(arena.arrival_path) as arrived:
                while arrived.num_bytes < arena.size_bytes:
                    await asyncio.sleep(0.001)
        self._engine.prepared[nonce] = {t.name: mapped[t.offset : t.offset + t.length] for t in tensors}

    async def commit(self, nonce: str, version: int, timeout_s: float) -> None:
        engine = self._engine
        if engine.running:
            engine.misuses.append("committed while it ran")
        if SleepTag.WEIGHTS in engine.asleep:
            engine.misuses.append("committed while its weights slept")
        engine.is_committing = True
        try:
            await engine.step("commit_weights", f"commit_weights {version}", timeout_s)
            engine.live, engine.prepared[nonce] = engine.prepared[nonce], engine.live
            engine.weight_version = version
        finally:
            engine.is_committing = False

    async def discard(self, nonce: str, timeout_s: float) -> None:
        when = "running" if self._engine.running else "paused"
        await self._engine.step("discard_weights", f"discard_weights {when}", timeout_s)
        self._engine.prepared.pop(nonce, None)

    async def unused_tensors(self, tensors: Sequence[TensorSpec], timeout_s: float) -> frozenset[str]:
        return frozenset()

    async def digests(self, timeout_s: float) -> DigestedWeights:
        engine = self._engine
        await engine.step("weight_digests", "weight_digests", timeout_s)
        if engine.num_unread_parts:
            engine.num_unread_parts -= 1
            return DigestedWeights(None, engine.part_s)
        return DigestedWeights([WeightDigest("dp0:pp0:pcp0:tp0", "w", "ab")], engine.part_s)


class ScriptedTransfer:
    """vLLM's own weight transfer, on tensors that are written in `info` as {name: text}. Steps are named transfer_init,
    transfer_start, transfer_update, transfer_finish and transfer_abandon."""

    def __init__(self, engine: "ScriptedEngine") -> None:
        self._engine = engine
        self.is_open = False

    async def init(self, info: str, timeout_s: float) -> None:
        await self._engine.step("transfer_init", f"transfer_init {info}", timeout_s)

    async def start(self, timeout_s: float) -> None:
        await self._step("start", timeout_s)
        self.is_open = True

    async def update(self, info: str, timeout_s: float) -> None:
        await self._step("update", timeout_s)
        for name, value in json.loads(info).items():
            self._engine.live = {**self._engine.live, name: value.encode()}

    async def finish(self, version: int, timeout_s: float) -> None:
        await self._step("finish", timeout_s)
        self.is_open = False
        self._engine.weight_version = version

    async def abandon(self, timeout_s: float) -> None:
        await self._step("abandon", timeout_s)
        self.is_open = False

    async def _step(self, step: str, timeout_s: float) -> None:
        if self._engine.running:
            self._engine.misuses.append(f"{step} while it ran")
        await self._engine.step(f"transfer_{step}", f"transfer_{step}", timeout_s)


class ScriptedLoras:
    """What is loaded under a name is what lies in its directory."""

    def __init__(self, engine: "ScriptedEngine") -> None:
        self._engine = engine
        self.files: dict[str, LoraDirectory] = {}
        self.versions: dict[str, int] = {}

    async def load(self, name: str, files: LoraDirectory, timeout_s: float, version: int = 0) -> LoadedLora:
        try:
            await self._engine.step("load_lora", f"load_lora {name}", timeout_s)
        except BaseException:
            files.close()
            raise
        previous = self.versions[name] if name in self.files else 0
        if name in self.files:
            self.files[name].close()
        self.files[name], self.versions[name] = files, version or previous + 1
        return self._told(name)

    def unload(self, name: str) -> LoadedLora:
        if name not in self.files:
            raise LoraNotFoundError(f"no adapter {name!r} is loaded")
        loaded = self._told(name)
        self.files.pop(name).close()
        return loaded

    def loaded(self) -> list[LoadedLora]:
        return [self._told(name) for name in sorted(self.files)]

    def close(self) -> None:
        for files in self.files.values():
            files.close()

    def _told(self, name: str) -> LoadedLora:
        files = self.files[name]
        version = self.versions[name]
        source, push_id = files.source, files.push_id
        what = name, version, files.rank, files.size_bytes, source, push_id
        return LoadedLora(*what, 1.5, num_requests=2, directory=files.directory)


class ScriptedInterruption:
    """Every client has told unless `telling` is cleared; every sequence has output again unless `over` is."""

    def __init__(self) -> None:
        self.telling = asyncio.Event()
        self.telling.set()
        self.over = asyncio.Event()
        self.over.set()
        self.num_tokens = 7
        self.wait_s: float | None = 2.5
        self.error: Exception | None = None

    @property
    def num_computed_tokens(self) -> int | None:
        return self.num_tokens if self.telling.is_set() else None

    async def told(self) -> None:
        await self.telling.wait()

    async def longest_wait_s(self) -> float | None:
        await self.over.wait()
        if self.error is not None:
            raise self.error
        return self.wait_s


class ScriptedEngine:
    """`fails[step]` raises there once, `hangs` has steps that last until their timeout, `gates[step]` holds one up.
    Steps are named as the methods: pause, resume, reset_caches, ...; those of its parts as these say.
    `timeouts_s` has what each step was last given. A reading of the weights takes `num_unread_parts` parts of `part_s`
    and a last one.
    `free` is cleared while a call that was given up goes on, `idle` while a request runs."""

    def __init__(self) -> None:
        self.weights = ScriptedWeights(self)
        self.transfer = ScriptedTransfer(self)
        self.backend = ""
        self.loras = ScriptedLoras(self)
        self.max_loras = 0
        self.max_model_len = 64
        self.can_sleep = True
        self.free = asyncio.Event()
        self.free.set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.cause_of_death = ""
        self.calls: list[str] = []
        self.misuses: list[str] = []
        self.running = True
        self.weight_version = 0
        self.live: dict[str, bytes] = {}
        self.dropped: dict[str, bytes] = {}
        self.asleep: set[SleepTag] = set()
        self.prepared: dict[str, dict[str, bytes]] = {}
        self.fails: dict[str, BaseException] = {}
        self.hangs: set[str] = set()
        self.gates: dict[str, Gate] = {}
        self.timeouts_s: dict[str, float] = {}
        self.num_unread_parts, self.part_s = 0, 0.0
        self.interruption = ScriptedInterruption()
        self.is_committing = False

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            "scripted",
            "Scripted",
            "bfloat16",
            *(8, "cpu", self.max_model_len, 4, 4, 256, 1, 1, 1, {}),
            weight_transfer=self.backend,
            logprobs_mode="processed_logprobs",
            max_loras=self.max_loras,
            max_lora_rank=8 if self.max_loras else 0,
            can_sleep=self.can_sleep,
        )

    def load(self) -> Load:
        return Load(running=3, waiting=2, kv_usage=0.0, tokens_per_second=0.0, prefix_cache_hit_rate=0.0)

    async def pause(self, mode: PauseMode, kv_policy: KvPolicy, timeout_s: float) -> PauseCounts:
        await self.step("pause", f"pause {mode.value} {kv_policy.value}", timeout_s)
        self.running = False
        return PauseCounts(kept=0, aborted=5) if mode is PauseMode.ABORT else PauseCounts(kept=5, aborted=0)

    def interrupted(self) -> ScriptedInterruption:
        if self.running:
            self.misuses.append("looked for what a pause interrupts while it ran")
        return self.interruption

    async def resume(self, timeout_s: float) -> None:
        await self.step("resume", "resume", timeout_s)
        if self.is_committing:
            self.misuses.append("resumed in the middle of a commit")
        if self.transfer.is_open:
            self.misuses.append("resumed in the middle of an update")
        self.running = True

    async def sleep(self, level: int, tags: Set[SleepTag], timeout_s: float) -> None:
        if self.running:
            self.misuses.append("put to sleep while it ran")
        await self.step("sleep", f"sleep {level} {_names(tags)}", timeout_s)
        self.asleep |= tags & MEMORY_TAGS
        if level == 2 and SleepTag.WEIGHTS in tags:
            self.live = self.dropped

    async def wake_up(self, tags: Set[SleepTag], timeout_s: float, *, paused: bool = False) -> None:
        await self.step("wake_up", f"wake_up {_names(tags)}{' paused' if paused else ''}", timeout_s)
        self.asleep -= tags
        if not self.asleep:  # whatever was asked for, as vLLM does
            if self.live is self.dropped:
                self.misuses.append("ran on weights that a sleep had dropped")
            self.running = not paused

    async def reset_prefix_cache(self, reset_running_requests: bool, timeout_s: float) -> bool:
        await self.step("reset_prefix_cache", f"reset_prefix_cache {reset_running_requests}", timeout_s)
        return True

    async def reset_caches(self, timeout_s: float) -> None:
        await self.step("reset_caches", "reset_caches", timeout_s)

    async def step(self, step: str, call: str, timeout_s: float) -> None:
        """Fails, hangs or waits where it is told to."""
        self.calls.append(call)
        self.timeouts_s[step] = timeout_s
        if step in self.gates:
            self.gates[step].reached.set()
            await self.gates[step].open.wait()
        if step in self.hangs:
            await asyncio.sleep(timeout_s)
            raise DeadlineError(f"{step} took longer than {timeout_s:g} s")
        if step in self.fails:
            raise self.fails.pop(step)

    @property
    def settling(self) -> list[str]:
        return [] if self.free.is_set() else ["a call that was given up"]

    async def settled(self) -> None:
        await self.free.wait()

    async def wait_idle(self) -> None:
        await self.idle.wait()

    async def wait_dead(self) -> None:
        await asyncio.Event().wait()

    async def submit(self, request: GenerationRequest) -> GenerationStream:
        raise NotImplementedError

    async def abort(self, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        self.calls.append("abort")
        num_active = 0 if self.idle.is_set() else 1
        self.idle.set()
        return ["r"] * num_active, []

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool) -> list[int]:
        raise NotImplementedError

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        raise NotImplementedError


def _names(tags: Set[SleepTag]) -> str:
    return "+".join(tag.value for tag in SleepTag if tag in tags)
