"""Memory that is ready before a push needs it."""

import asyncio

import pytest

from genserve.errors import StagingFullError
from genserve.memory.arena import Arena
from genserve.weights.push.types import PushAction
from genserve.weights.resident import ArenaBytes, ResidentStore, ResidentVersion
from tests.support.patience import turns, until
from tests.unit.weights.conftest import MANIFEST, Rig, header, nothing_runs, num_arenas


async def until_spare(store: ResidentStore, size_bytes: int) -> None:
    """Returns when memory of this size waits for the next push."""
    await until(lambda: store.spare_bytes == size_bytes)


@pytest.mark.slow
async def test_memory_is_ready_before_the_first_two_pushes() -> None:
    """Later ones find that of the version before."""
    before = num_arenas()
    store = ResidentStore(None, enabled=True)
    keeping = asyncio.create_task(store.keep_reserved(MANIFEST.total_bytes, lambda: 1 << 40))
    for number in (1, 2, 3):
        await until_spare(store, MANIFEST.total_bytes)
        assert num_arenas() == before + (1 if number == 1 else 2)
        arena = await store.arena_for(MANIFEST.total_bytes)
        assert num_arenas() == before + (1 if number == 1 else 2)  # no other one was made
        store.replace(ResidentVersion(number, MANIFEST, ArenaBytes(arena)))
    keeping.cancel()
    store.release_memory()
    assert num_arenas() == before


async def test_the_second_push_finds_memory_of_the_size_of_the_first() -> None:
    """A trainer may push a wider type than the checkpoint's, or leave out tied tensors."""
    before, wide_bytes = num_arenas(), 2 * MANIFEST.total_bytes
    store = ResidentStore(None, enabled=True)
    keeping = asyncio.create_task(store.keep_reserved(MANIFEST.total_bytes, lambda: 1 << 40))
    await until_spare(store, MANIFEST.total_bytes)
    arena = await store.arena_for(wide_bytes)
    store.replace(ResidentVersion(1, MANIFEST, ArenaBytes(arena)))
    await until_spare(store, wide_bytes)
    keeping.cancel()
    store.release_memory()
    assert num_arenas() == before


async def test_a_push_waits_for_memory_that_is_being_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take as long to get other memory, and then there were two."""
    before, gate = num_arenas(), asyncio.Event()

    async def allocate_late(size_bytes: int) -> Arena:
        await gate.wait()
        return Arena.allocate(size_bytes)

    monkeypatch.setattr("genserve.weights.resident.allocate_arena", allocate_late)
    store = ResidentStore(None, enabled=True)
    keeping = asyncio.create_task(store.keep_reserved(MANIFEST.total_bytes, lambda: 1 << 40))
    await turns()
    taking = asyncio.create_task(store.arena_for(MANIFEST.total_bytes))
    await turns()
    assert not taking.done()
    gate.set()
    arena = await taking
    assert num_arenas() == before + 1
    keeping.cancel()
    arena.close()


@pytest.mark.parametrize("why", ["little memory", "unknown memory", "not kept"])
async def test_no_memory_is_reserved_where_others_need_it(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Pushes get theirs when they come."""

    def available() -> int:
        if why == "unknown memory":
            raise FileNotFoundError("/proc/meminfo")
        return 4 * MANIFEST.total_bytes if why == "little memory" else 1 << 40

    monkeypatch.setattr("genserve.weights.resident.available_memory_bytes", available)
    store = ResidentStore(None, enabled=why != "not kept")
    keeping = asyncio.create_task(store.keep_reserved(MANIFEST.total_bytes, lambda: 1 << 40))
    await nothing_runs()
    assert not keeping.done()
    assert store.spare_bytes == 0
    keeping.cancel()


async def test_memory_that_cannot_be_had_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first push says so, if it is still so then."""

    async def refuse(size_bytes: int) -> Arena:
        raise StagingFullError("none")

    monkeypatch.setattr("genserve.weights.resident.allocate_arena", refuse)
    store = ResidentStore(None, enabled=True)
    keeping = asyncio.create_task(store.keep_reserved(MANIFEST.total_bytes, lambda: 1 << 40))
    await nothing_runs()
    assert not keeping.done()
    keeping.cancel()
    with pytest.raises(StagingFullError):
        await store.arena_for(MANIFEST.total_bytes)


async def test_what_is_reserved_stays_within_the_limit(rig: Rig) -> None:
    """It has room for three versions: the served one, and two that are staged."""
    size_bytes = MANIFEST.total_bytes
    keeping = asyncio.create_task(rig.resident.keep_reserved(size_bytes, lambda: rig.registry.room_bytes))
    await until_spare(rig.resident, size_bytes)
    for number in (1, 2, 3):
        await rig.push(header(f"p{number}", number, action=PushAction.STAGE))
    await rig.registry.commit("p1", header().apply)
    await nothing_runs()
    assert rig.registry.room_bytes == 100 - 3 * size_bytes
    assert rig.resident.spare_bytes == 0
    rig.registry.discard("p2")
    await rig.registry.commit("p3", header().apply)
    await until_spare(rig.resident, size_bytes)  # the arena of the first version
    keeping.cancel()
