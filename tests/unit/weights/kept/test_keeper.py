"""Versions are kept beside serving: no push waits for the disk, and nothing of a failure is left."""

import asyncio
import logging
import resource
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from genserve.control.membership import FleetRecord, RouterRun
from genserve.control.state import StateBoard
from genserve.errors import NotResidentError
from genserve.weights.kept.checkpoint import digest_of, open_kept
from genserve.weights.kept.directory import KeptDirectory, KeptRecord
from genserve.weights.kept.keeper import Keeper
from genserve.weights.resident import ArenaBytes, ResidentStore, ResidentVersion
from tests.support.patience import turns, until
from tests.support.refusals import refuses
from tests.unit.weights.conftest import wait_for_threads
from tests.unit.weights.kept.versions import MANIFEST, digest_of_version, model_files, resident


class HeldBytes:
    """The bytes of a version, which are read when `open` is set; `reached` is when somebody waits for that."""

    held_bytes = 0

    def __init__(self, number: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        source = resident(number).source
        assert isinstance(source, ArenaBytes)
        self._source = source

    def check(self) -> None: ...

    def view(self, start: int, end: int) -> memoryview:
        self.reached.set()
        self.open.wait(30)
        return self._source.view(start, end)

    def read_into(self, start: int, target: memoryview) -> None:
        self._source.read_into(start, target)

    def close(self) -> None:
        self._source.close()


def held(number: int) -> tuple[ResidentVersion, HeldBytes]:
    """A version that is written when the test says so."""
    source = HeldBytes(number)
    return ResidentVersion(number, MANIFEST, source, f"push {number}"), source


@asynccontextmanager
async def keeping(path: Path) -> AsyncIterator[tuple[Keeper, ResidentStore]]:
    """Version 0, the checkpoint, is served, and what follows it is kept."""
    store = ResidentStore(resident(0), enabled=True)
    keeper = Keeper(KeptDirectory(path / "kept"), store, model_files(path / "model"))
    task = asyncio.create_task(keeper.run())
    try:
        yield keeper, store
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        store.release_memory()
        wait_for_threads()


def kept(keeper: Keeper) -> tuple[KeptRecord | None, ...]:
    """The latest version and the one before, each read from the disk."""
    directory = keeper.directory
    latest = directory.latest
    found = [latest, None if latest is None else directory.before(latest.record.push_id)]
    for each in found:
        assert each is None or digest_of(open_kept(each.path)) == each.record.content_digest
    return tuple(each and each.record for each in found)


def record(number: int) -> KeptRecord:
    """Of a version."""
    return KeptRecord(number, f"push {number}", digest_of_version(number))


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow above half of a version, as on a disk that has no more room."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MANIFEST.total_bytes // 2, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


async def test_each_version_that_is_served_is_kept_but_not_the_checkpoint(tmp_path: Path) -> None:
    """With its number, its push, and the digest of its tensors."""
    async with keeping(tmp_path) as (keeper, store):
        await turns()
        await keeper.close()
        assert kept(keeper) == (None, None) and keeper.weight_version == 0
        store.replace(resident(1, digest_of_version(1)))
        await keeper.close()
        assert kept(keeper) == (record(1), None)
        with refuses(NotResidentError, says="no version before"):
            keeper.before_served()
        store.replace(resident(2))
        await keeper.close()
        assert kept(keeper) == (record(2), record(1)) and keeper.weight_version == 2
        assert keeper.before_served().record == record(1)
        assert keeper.num_failed == 0


def board_of_fleet() -> StateBoard:
    """Of a daemon that a router looks after."""
    board = StateBoard(None, tuple, "daemon")
    board.membership.looked_after(RouterRun("r", "router")).__enter__()
    return board


def written(epoch: int, number: int) -> FleetRecord:
    """By the router."""
    return FleetRecord(epoch, b"", number, f"push {number}")


async def test_the_epoch_of_a_version_is_kept_with_it(tmp_path: Path) -> None:
    """Whether the router writes it down before or after the version is on the disk. That of another version is not."""
    async with keeping(tmp_path) as (keeper, store):
        board = board_of_fleet()
        keeper.follow(board)
        board.membership.keep("r", written(5, 1))
        store.replace(resident(1))
        await keeper.close()
        assert kept(keeper) == (replace(record(1), fleet_epoch=5), None)
        store.replace(resident(2))
        await keeper.close()
        assert kept(keeper)[0] == record(2)
        board.membership.keep("r", written(6, 2))
        await until(lambda: kept(keeper)[0] == replace(record(2), fleet_epoch=6))
        board.membership.keep("r", written(7, 3))
        await turns()
        assert kept(keeper)[0] == replace(record(2), fleet_epoch=6)
        assert keeper.num_failed == 0


async def test_the_latest_version_is_next_and_none_waits_in_a_queue(tmp_path: Path) -> None:
    """Those that were served while one was written are not written."""
    async with keeping(tmp_path) as (keeper, store):
        first, gate = held(1)
        store.replace(first)
        await until(gate.reached.is_set)
        for number in (2, 3, 4):
            store.replace(resident(number))
        assert keeper.directory.latest is None, "the version that is being written is not there before it is whole"
        gate.open.set()
        await keeper.close()
        assert kept(keeper) == (record(4), record(1))


async def test_what_a_full_disk_does_not_take_leaves_what_was_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told, what was begun is removed, and the next version is kept."""
    async with keeping(tmp_path) as (keeper, store):
        store.replace(resident(1))
        await keeper.close()
        second = resident(2)
        third = resident(3)
        with full_disk():
            store.replace(second)
            await keeper.close()
        assert kept(keeper) == (record(1), None)
        assert (keeper.num_failed, keeper.weight_version, keeper.keeps_served) == (1, 1, False)
        assert not (tmp_path / "kept" / "writing").exists()
        (told,) = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
        assert "version 2 is not kept" in told and "version 1" in told
        assert keeper.before_served().record == record(1), "that is the one before the served one"
        store.replace(third)
        await keeper.close()
        assert kept(keeper) == (record(3), record(1)) and keeper.keeps_served


async def test_memory_that_is_needed_is_not_waited_for(tmp_path: Path) -> None:
    """A push takes the bytes of the version that is being written: the next one is kept instead."""
    async with keeping(tmp_path) as (keeper, store):
        first, gate = held(1)
        store.replace(first)
        await until(gate.reached.is_set)
        store.replace(resident(2))
        store.release_replaced()
        gate.open.set()
        await keeper.close()
        assert kept(keeper) == (record(2), None)
        assert keeper.num_failed == 1


async def test_bytes_that_differ_from_their_digest_are_not_kept(tmp_path: Path) -> None:
    """The memory of the daemon is damaged."""
    async with keeping(tmp_path) as (keeper, store):
        store.replace(resident(1, digest_of_version(2)))
        await keeper.close()
        assert kept(keeper) == (None, None) and keeper.num_failed == 1


async def test_what_vllm_transfers_is_told_not_to_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its bytes are nowhere but in the workers; the version before it is the one that was kept."""
    async with keeping(tmp_path) as (keeper, store):
        store.replace(resident(1))
        await keeper.close()
        await turns()
        store.forget("came by another way")
        await until(lambda: keeper.num_failed == 1)
        assert "came by another way" in caplog.text
        assert kept(keeper) == (record(1), None)
        assert keeper.before_served().record == record(1)


async def test_a_daemon_that_ends_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    """Its thread ends too, and removes what it has begun."""
    async with keeping(tmp_path) as (keeper, store):
        first, gate = held(1)
        store.replace(first)
        await until(gate.reached.is_set)
        await keeper.close_within(0.0)
    assert keeper.directory.latest is None
    gate.open.set()
    wait_for_threads()
    await until(lambda: not (tmp_path / "kept" / "writing").exists())
    assert keeper.directory.latest is None


async def test_a_daemon_that_ends_writes_no_more(tmp_path: Path) -> None:
    """Although the bytes are still there: the process would wait for its thread."""
    store = ResidentStore(resident(0), enabled=True)
    keeper = Keeper(KeptDirectory(tmp_path / "kept"), store, model_files(tmp_path / "model"))
    running = asyncio.create_task(keeper.run())
    first, gate = held(1)
    store.replace(first)
    await until(gate.reached.is_set)
    running.cancel()
    await asyncio.wait({running})
    gate.open.set()
    await until(lambda: not (tmp_path / "kept" / "writing").exists())
    assert keeper.directory.latest is None
    store.release_memory()


async def test_what_was_removed_is_not_told_as_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the next version is kept again."""
    async with keeping(tmp_path) as (keeper, store):
        store.replace(resident(1))
        await keeper.close()
        second, third = resident(2), resident(3)
        shutil.rmtree(tmp_path / "kept")
        with full_disk():
            store.replace(second)
            await keeper.close()
        assert "version 2 is not kept" in caplog.text and "has no version yet" in caplog.text
        assert keeper.weight_version == 0
        store.replace(third)
        await keeper.close()
        assert kept(keeper) == (record(3), None)
