"""A registry on a scripted engine, and pushes of a few bytes through real arenas."""

import asyncio
import gc
import hashlib
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import google_crc32c
import pytest

from genserve.control.conditions import Phase
from genserve.control.leases import LeaseTable
from genserve.control.pause import PauseController
from genserve.control.sleep import SleepController
from genserve.control.state import StateBoard
from genserve.tensors.manifest import Manifest
from genserve.weights.apply import PushApplier
from genserve.weights.checkpoint.files import CheckpointFiles
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from genserve.weights.checkpoint.space import CheckpointBytes, CheckpointSpace
from genserve.weights.lora.loader import LoraLoader
from genserve.weights.push.stream import PushStream
from genserve.weights.push.types import PushHeader, PushOutcome
from genserve.weights.registry import PushRegistry
from genserve.weights.resident import ResidentStore, ResidentVersion
from genserve.weights.vllm_transfer import TransferUpdates
from tests.support import memory_files
from tests.support.clocks import AdvancedClock
from tests.support.patience import turns, until
from tests.support.scripted_engine import ScriptedEngine

CHECKPOINT = CheckpointIndex({"a": CheckpointTensor("F32", (4,), 16), "b": CheckpointTensor("BF16", (8,), 16)})
MANIFEST = CHECKPOINT.as_manifest()
MAX_STAGING_BYTES = 100

T = TypeVar("T")


def weights(version: int) -> bytes:
    """32 bytes that differ from version to version."""
    return hashlib.sha256(str(version).encode()).digest()


def tensors(version: int) -> dict[str, bytes]:
    """What an engine that serves the version holds."""
    return {"a": weights(version)[:16], "b": weights(version)[16:]}


def contents(version: int) -> str:
    """As PushHeader.content_digest says it."""
    data = weights(version)
    a, b = (hashlib.sha256(part).hexdigest() for part in (data[:16], data[16:]))
    return hashlib.sha256(f"a\tF32\t4\t{a}\nb\tBF16\t8\t{b}\n".encode()).hexdigest()


def header(push_id: str = "p1", weight_version: int = 1, **fields: Any) -> PushHeader:
    """A header with the checkpoint's manifest."""
    manifest: Manifest | None = fields.pop("manifest", MANIFEST)
    return PushHeader(push_id, weight_version, manifest=manifest, **fields)


@dataclass
class Rig:
    """Everything between the servicers and the engine."""

    engine: ScriptedEngine
    leases: LeaseTable
    board: StateBoard
    pauses: PauseController
    sleeps: SleepController
    resident: ResidentStore
    applier: PushApplier
    registry: PushRegistry
    transfers: TransferUpdates
    loras: LoraLoader
    background: "list[asyncio.Task[None]]" = field(default_factory=list)

    async def push(self, opened: PushHeader, data: bytes | None = None) -> PushOutcome:
        """One stream with everything."""
        stream = await self.registry.open(opened)
        try:
            send(stream, weights(opened.weight_version) if data is None else data)
            return await stream.finish()
        finally:
            stream.detach()

    async def stage_part(self, opened: PushHeader, start: int, end: int) -> None:
        """A stream that is cut off after bytes [start, end)."""
        stream = await self.registry.open(opened)
        send(stream, weights(opened.weight_version), start, end)
        stream.detach()


def send(stream: PushStream, data: bytes, start: int = 0, end: int | None = None) -> None:
    """Bytes [start, end) in chunks of seven."""
    end = len(data) if end is None else end
    for offset in range(start, end, 7):
        chunk = data[offset : min(offset + 7, end)]
        stream.write(offset, chunk, google_crc32c.value(chunk))


def further(opened: PushHeader) -> PushHeader:
    """The header of a further stream: the digest instead of the manifest."""
    return replace(opened, manifest=None, manifest_digest=MANIFEST.digest)


def now_s() -> float:
    """Also when a test has set the clock forward."""
    return time.monotonic()


def build_rig(
    directory: Path,
    max_staging_bytes: int = MAX_STAGING_BYTES,
    clock: Callable[[], float] = now_s,
    checkpoint: CheckpointIndex | None = CHECKPOINT,
    *,
    keeps_resident: bool = True,
) -> Rig:
    """Serves version 0, whose bytes are a file in `directory`; on a running event loop. `checkpoint` is what pushes are
    compared with."""
    engine, leases = ScriptedEngine(), LeaseTable(clock)
    engine.live = tensors(0)
    board = StateBoard(engine, lambda: leases.active, "test")
    pauses = PauseController(engine, leases, board)
    file = directory / "weights"
    file.write_bytes(weights(0))
    os.utime(file, (1, 1))  # an old file: kernels tell the time in steps of milliseconds
    placed = {
        "a": replace(CHECKPOINT.tensors["a"], path=file),
        "b": replace(CHECKPOINT.tensors["b"], path=file, position=16),
    }
    space = CheckpointSpace(CheckpointIndex(placed), CheckpointFiles([file]))
    first = ResidentVersion(0, MANIFEST, CheckpointBytes(space))
    resident = ResidentStore(first, enabled=keeps_resident)
    applier = PushApplier(engine, pauses, board, resident)
    loras = LoraLoader(engine, board, pauses, CHECKPOINT)
    pushes = PushRegistry(checkpoint, engine, applier, loras, board, resident, max_staging_bytes, clock)
    transfers = TransferUpdates(engine, pauses, board, pushes, applier, resident, clock)
    sleeps = SleepController(engine, pauses, board, applier)
    background = [asyncio.create_task(each.run()) for each in (pauses, pushes.live, transfers)]
    return Rig(engine, leases, board, pauses, sleeps, resident, applier, pushes, transfers, loras, background)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """One that nobody may misuse."""
    async with open_rig(tmp_path) as rig:
        yield rig


@asynccontextmanager
async def open_rig(directory: Path, **built: Any) -> AsyncIterator[Rig]:
    """The same, of which the test says how it is built."""
    rig = build_rig(directory, **built)
    background = list(rig.background)
    yield rig
    ended = [task for task in rig.background if task.done()]
    for task in background:
        task.cancel()
    await asyncio.wait(background)
    await rig.registry.close()
    rig.resident.release_memory()
    wait_for_threads()  # the next test would count as its own what they free
    assert rig.engine.misuses == []
    assert ended == []


@pytest.fixture
async def takes_arriving_weights(rig: Rig) -> AsyncIterator[None]:
    """Its workers are on this host, and hold nothing in the end."""
    rig.engine.weights.takes_arriving = True
    yield
    await rig.registry.close()
    async with rig.applier.between_pushes(30.0):
        assert rig.engine.prepared == {}, "workers hold what nobody will use"


async def assert_unchanged(rig: Rig) -> None:
    """Version 0 is live and runs, nothing is left in the engine, and the board says so; at once, or when what failed is
    undone."""
    await until(lambda: rig.engine.running and not rig.engine.prepared)
    assert rig.engine.live == tensors(0)
    assert rig.engine.weight_version == 0
    assert rig.board.phase is Phase.RUNNING


async def after(
    clock: AdvancedClock, seconds: float, work: Awaitable[T], once: Callable[[], object] = lambda: True
) -> T:
    """What `work` returns or raises when these seconds pass, `once` it has come so far."""
    task = asyncio.ensure_future(work)
    await until(lambda: task.done() or once())
    await clock.advance(seconds)
    return await task


async def nothing_runs() -> None:
    """Returns when whatever goes on waits for something, in the loop and in its threads: what has not happened by then
    does not happen."""
    for _ in range(2):  # what a thread has ended may give work to another one
        await turns()
        wait_for_threads()
    await turns()


def num_arenas() -> int:
    """Arenas that this process holds, when the threads that free some are done."""
    with suppress(RuntimeError):  # without a loop there are none
        wait_for_threads()
    gc.collect()
    return num_open_arenas()


def wait_for_threads() -> None:
    """Returns when no thread of the running loop frees an arena any more, or has been held up for long by a test."""
    executor = asyncio.get_running_loop()._default_executor  # type: ignore[attr-defined]
    if executor is not None:
        # They meet when all that was asked for before is done.
        meeting = threading.Barrier(executor._max_workers + 1, timeout=3.0)
        for _ in range(executor._max_workers):
            executor.submit(meeting.wait)
        with suppress(threading.BrokenBarrierError):
            meeting.wait()


def num_open_arenas() -> int:
    """The same at once: some may be about to be freed. To collect garbage takes long where torch is loaded."""
    return len(memory_files.open_files("genserve-arena"))
