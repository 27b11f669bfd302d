"""Opening a push: everything is decided before anything is given up, and it is carried to its end."""

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from genserve.errors import DrainingError, PushNotFoundError, StagingFullError
from genserve.memory import available
from genserve.memory.arena import Arena
from genserve.tensors.manifest import Manifest
from genserve.weights import registry as registry_module
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from genserve.weights.push.types import ApplyOptions, PushAction, PushState
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, turns, until
from tests.unit.weights.conftest import CHECKPOINT, MANIFEST, Rig, further, header, num_arenas, open_rig, weights
from tests.unit.weights.prepared import PART


class SlowAllocation:
    """Reservations that last until they are let go; how many there are at a time."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.num_at_once = self.most_at_once = self.num_begun = 0
        self.closed_by: list[str] = []
        self._lock = threading.Lock()
        self._reserve = os.posix_fallocate

    def reserve(self, fd: int, offset: int, size_bytes: int) -> None:
        with self._lock:
            self.num_at_once += 1
            self.num_begun += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            self.let_go.wait(STEP_S)
            self._reserve(fd, offset, size_bytes)
        finally:
            with self._lock:
                self.num_at_once -= 1


@pytest.fixture
def allocation(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowAllocation]:
    slow = SlowAllocation()
    close = Arena.close

    def note_close(arena: Arena) -> None:
        if not arena.closed:
            slow.closed_by.append(threading.current_thread().name)
        close(arena)

    monkeypatch.setattr(os, "posix_fallocate", slow.reserve)
    monkeypatch.setattr(Arena, "close", note_close)
    yield slow
    slow.let_go.set()


async def test_opens_that_are_cancelled_do_not_allocate_side_by_side(
    rig: Rig, allocation: SlowAllocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that opens and cancels in a loop gets one reservation at a time, which counts until it is freed, and
    never by the event loop."""
    before, examine, examined = num_arenas(), registry_module.examine, threading.Semaphore(0)

    def noted(*args: Any, **fields: Any) -> Any:
        try:
            return examine(*args, **fields)
        finally:
            examined.release()

    monkeypatch.setattr(registry_module, "examine", noted)
    for number in range(6):
        opening = asyncio.create_task(rig.registry.open(header(f"p{number}", 1)))
        await until(lambda: examined.acquire(blocking=False))  # then it allocates, or waits for its turn to
        await turns()
        if number == 0:
            await until(lambda: allocation.num_begun)
        opening.cancel()
    allocation.let_go.set()
    await until(lambda: not allocation.num_at_once and num_arenas() <= before + 1)
    assert allocation.most_at_once == 1
    assert allocation.num_begun == 1, "whoever has gone before its turn needs no memory"
    await rig.push(header("next", 1))
    assert threading.main_thread().name not in allocation.closed_by


async def test_a_refused_open_leaves_other_pushes_as_they_are(rig: Rig) -> None:
    """One that does not fit does not first take the place of one that could be resumed."""
    for version in (1, 2):
        await rig.push(header(f"staged {version}", version, action=PushAction.STAGE))
    await rig.stage_part(header("part", 3, attempt="a"), 0, 20)
    with pytest.raises(StagingFullError):
        await rig.registry.open(header("large", 4, manifest=large_manifest()))
    assert rig.registry.report("part").push.received_bytes == 20
    stream = await rig.registry.open(header("part", 3, attempt="a"))
    stream.write(20, weights(3)[20:], None)
    assert (await stream.finish()).push.state is PushState.APPLIED
    stream.detach()


async def test_open_without_machine_memory_leaves_other_pushes_unchanged(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the quota would allow it."""
    await rig.stage_part(header("part", 1, attempt="a"), 0, 20)
    monkeypatch.setattr(available, "available_memory_bytes", lambda: 0)
    with pytest.raises(StagingFullError):
        await rig.registry.open(header("next", 2))
    assert rig.registry.report("part").push.received_bytes == 20


async def test_open_of_a_part_without_machine_memory_leaves_everything_unchanged(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not get the arena that waits, which only has the size of what the part is completed to."""
    await rig.push(header("first", 1))
    await rig.push(header("second", 2, action=PushAction.STAGE))
    await rig.stage_part(header("part", 3, attempt="a"), 0, 20)
    await rig.registry.commit("second", ApplyOptions())
    assert rig.resident.spare_bytes == MANIFEST.total_bytes
    monkeypatch.setattr(available, "available_memory_bytes", lambda: 0)
    with pytest.raises(StagingFullError):
        await rig.registry.open(header("next", 3, manifest=PART))
    assert rig.registry.report("part").push.received_bytes == 20
    assert rig.resident.spare_bytes == MANIFEST.total_bytes


async def test_a_discard_reaches_a_push_that_is_being_opened(rig: Rig, allocation: SlowAllocation) -> None:
    """Also while its memory is allocated; nothing of it is left, and a repeat begins anew."""
    opening = asyncio.create_task(rig.registry.open(header("p1")))
    await until(lambda: allocation.num_begun)
    with pytest.raises(PushNotFoundError):
        rig.registry.discard("p1")
    with pytest.raises(PushNotFoundError):
        rig.registry.discard("p1", force=True)
    opening.cancel()  # as by a caller who has gone, of whom the daemon hears late
    allocation.let_go.set()
    await asyncio.wait({opening})
    assert opening.cancelled()  # whoever has gone is not told that it was discarded
    with pytest.raises(PushNotFoundError):
        rig.registry.report("p1")
    (await rig.registry.open(header("p1"))).detach()


async def test_a_push_that_was_opened_for_nobody_makes_room(rig: Rig, allocation: SlowAllocation) -> None:
    """Its client went while the memory was reserved."""
    opening = asyncio.create_task(rig.registry.open(header("gone", 1)))
    await until(lambda: allocation.num_begun)
    opening.cancel()
    allocation.let_go.set()
    await asyncio.wait({opening})
    await rig.push(header("next", 1))
    with pytest.raises(PushNotFoundError):
        rig.registry.report("gone")


async def test_a_push_that_is_opened_while_the_daemon_ends_holds_no_memory(
    rig: Rig, allocation: SlowAllocation
) -> None:
    """It was asked for in time, and comes too late. The event loop does not free it."""
    before = num_arenas()
    opening = asyncio.create_task(rig.registry.open(header()))
    await until(lambda: allocation.num_begun)
    await rig.registry.close()
    allocation.let_go.set()
    with pytest.raises(DrainingError):
        await opening
    assert num_arenas() == before
    assert len(allocation.closed_by) == 1 and threading.main_thread().name not in allocation.closed_by
    with pytest.raises(PushNotFoundError):
        rig.registry.report("p1")


async def test_a_dry_run_needs_the_manifest_itself(rig: Rig) -> None:
    """Its digest alone tells nothing, also where a push of that manifest is here."""
    await rig.push(header(action=PushAction.STAGE))
    with pytest.raises(PushNotFoundError) as refused:
        await rig.registry.open(replace(further(header()), action=PushAction.VALIDATE))
    assert refused.value.metadata == {"push_id": "p1"}
    assert rig.registry.report("p1").push.state is PushState.STAGED


def large_manifest() -> Manifest:
    """A good one that does not fit beside two staged pushes: F64 for F32, which is cast on load."""
    return CheckpointIndex(dict(CHECKPOINT.tensors) | {"a": CheckpointTensor("F64", (4,), 32)}).as_manifest()


async def test_chunks_keep_a_slow_push_alive(rig: Rig) -> None:
    """The time to live counts from the last chunk, not from the header."""
    stream = await rig.registry.open(header(staging_ttl_s=1000.0))
    with advanced_clock() as clock:
        for offset in range(0, 32, 8):
            await clock.advance(600.0)
            stream.write(offset, weights(1)[offset : offset + 8], None)
        assert (await stream.finish()).push.state is PushState.APPLIED
    stream.detach()


async def test_push_of_no_bytes_is_complete_at_once(tmp_path: Path) -> None:
    """Tensors without elements are tensors."""
    empty = CheckpointIndex({"e": CheckpointTensor("F32", (0,), 0)}).as_manifest()
    async with open_rig(tmp_path, checkpoint=None) as rig:
        assert (await rig.push(header(manifest=empty), b"")).push.state is PushState.APPLIED
        assert rig.engine.live == {"e": b""}
