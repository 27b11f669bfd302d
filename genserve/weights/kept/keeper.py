"""Keeps the served version on disk, beside serving.

One version is written at a time. If others are served meanwhile, the latest of them is next: none waits in a queue, and
no push waits for the disk. What cannot be written is told, and the version that was kept before stays.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from genserve.aio import Change
from genserve.control.membership import NO_RECORD
from genserve.control.state import StateBoard
from genserve.errors import GenserveError, NotResidentError
from genserve.weights.kept.checkpoint import SHARD_BYTES, digest_of, open_kept, write_checkpoint
from genserve.weights.kept.directory import KeptDirectory, KeptError, KeptRecord, KeptVersion
from genserve.weights.resident import ResidentStore, ResidentVersion

log = logging.getLogger(__name__)


class _Stopped(Exception):
    """The daemon ends, and does not wait for the disk any more."""


class Keeper:
    """Writes what is served. `files`: the directory with the configuration and the tokenizer."""

    def __init__(
        self, directory: KeptDirectory, resident: ResidentStore, files: Path, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.directory = directory
        self.num_failed = 0
        """Versions that were served and could not be kept."""
        self._resident = resident
        self._files = files
        self._shard_bytes = shard_bytes
        self._handled = resident.served  # the checkpoint, or what was kept
        self._changed = Change()
        self._stopping = threading.Event()
        self._written_down = NO_RECORD
        self._told = Change()
        latest = directory.latest
        self._record = None if latest is None else latest.record

    @property
    def record(self) -> KeptRecord | None:
        """Of the version that is on disk; None = none yet."""
        return self._record

    def follow(self, board: StateBoard) -> None:
        """From now on the epoch in which a router has written down that its fleet serves a version is kept with it."""

        def look() -> None:
            if board.membership.record is not self._written_down:
                self._written_down = board.membership.record
                self._told.notify()

        look()
        board.call_on_change(look)

    @property
    def weight_version(self) -> int:
        """The version that is on disk; 0 = none yet."""
        return 0 if self._record is None else self._record.weight_version

    @property
    def served_version(self) -> int | None:
        """The served version, None if its bytes are not here."""
        served = self._resident.served
        return None if served is None else served.weight_version

    @property
    def keeps_served(self) -> bool:
        """Whether the served version is on disk."""
        return self._record is not None and self._record.push_id == self._resident.push_id

    def before_served(self) -> KeptVersion:
        """The version that was kept before the served one. Raises NotResidentError."""
        try:
            found = self.directory.before(self._resident.push_id)
        except KeptError as error:
            raise NotResidentError(str(error)) from error
        if found is None:
            raise NotResidentError(
                f"{self.directory.path} has no version before the served one: load a checkpoint, or from a peer"
            )
        return found

    async def run(self) -> None:
        """Keeps each version that is served, until it is cancelled. Never returns, and fails only with the loop."""
        try:
            while True:
                replaced, told = self._resident.replacement.next, self._told.next
                await self._keep_served()
                await self._keep_epoch()
                self._changed.notify()
                await _either(replaced, told)
        finally:
            self._stopping.set()

    async def close(self) -> None:
        """Returns when what is served is kept, or is known not to be. May be cancelled."""
        while (served := self._resident.served) is not None and served is not self._handled:
            await self._changed.wait()

    async def close_within(self, limit_s: float) -> None:
        """`close`, for a limited time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.close()

    async def _keep_served(self) -> None:
        served = self._resident.served
        if served is self._handled:
            return
        what = "the served version" if served is None else f"version {served.weight_version}"
        try:
            with self._resident.reading() as version:
                began_s = time.perf_counter()
                # The thread goes on for a moment if this task is cancelled: it looks whether it is to stop.
                record = await asyncio.to_thread(self._write, version)
            record = replace(record, fleet_epoch=self._epoch_of(record))
            self._record = await asyncio.to_thread(self._finish, record)  # the memory is free for a push meanwhile
            log.info("%s is kept in %s (%.1f s)", what, self.directory.path, time.perf_counter() - began_s)
        except Exception as error:  # whatever it is, serving goes on
            self._record = await asyncio.to_thread(self._on_disk)
            has = f"still has version {self.weight_version}" if self.weight_version else "has no version yet"
            is_bug = not isinstance(error, OSError | GenserveError | ValueError)
            log.error("%s is not kept: %s; %s %s", what, error, self.directory.path, has, exc_info=is_bug)
            self.num_failed += 1  # whoever sees it finds the rest done
        self._handled = served

    def _on_disk(self) -> KeptRecord | None:
        """The version that a start would serve: somebody may have removed it."""
        with suppress(KeptError, OSError):
            latest = self.directory.latest
            return None if latest is None else latest.record
        return None

    def _epoch_of(self, record: KeptRecord) -> int:
        told = self._written_down
        return told.epoch if (told.weight_version, told.push_id) == (record.weight_version, record.push_id) else 0

    async def _keep_epoch(self) -> None:
        """The first one in which the version was that of the fleet says enough: later versions have higher ones."""
        record = self._record
        if record is None or record.fleet_epoch or not (epoch := self._epoch_of(record)):
            return
        noted = replace(record, fleet_epoch=epoch)
        try:
            await asyncio.to_thread(self.directory.note, noted)
            self._record = noted
        except OSError as error:
            log.error("the epoch of version %d is not kept: %s", record.weight_version, error)

    def _write(self, version: ResidentVersion) -> KeptRecord:
        """Writes it, in a thread, and returns what was written."""

        def view(start: int, end: int) -> memoryview:
            self._check_running()
            return version.window(start, end)

        with self._settled_on_error():
            target = self.directory.begin()
            digest = write_checkpoint(target, version.manifest, view, self._files, self._shard_bytes)
            if version.content_digest not in ("", digest):
                raise KeptError(f"its bytes have SHA-256 {digest}, it came with {version.content_digest}")
            return KeptRecord(version.weight_version, version.push_id, digest)

    def _finish(self, record: KeptRecord) -> KeptRecord:
        """Reads back what was written, in a thread, and puts it in its place."""
        with self._settled_on_error():
            found = digest_of(open_kept(self.directory.writing), self._check_running)
            if found != record.content_digest:
                raise KeptError(f"it has SHA-256 {found} when it is read back, {record.content_digest} was written")
            self.directory.finish(record)
            return record

    @contextmanager
    def _settled_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.directory.settle()
            raise

    def _check_running(self) -> None:
        if self._stopping.is_set():
            raise _Stopped


async def _either(*events: asyncio.Event) -> None:
    """Returns when one of them is set."""
    waits = [asyncio.create_task(each.wait()) for each in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()
