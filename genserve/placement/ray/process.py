"""The router's side of the process that talks to Ray, and the replicas that it finds for a router that does not run
them. Imports no Ray."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, suppress
from typing import Final

from genserve.fleet.discovery import INTERVAL_S
from genserve.launcher.end_with_starter import ending_with_this_process
from genserve.observe.notices import say
from genserve.placement.ray.settings import RayConfig, Task, addresses_of
from genserve.process.supervisor import Deaths

_ENV: Final = {"RAY_DEDUP_LOGS": "0", "RAY_DISABLE_WORKER_LOG_PREFIX": "1"}
"""What daemons say appears as they say it: two replicas that say the same are two lines."""
_LONGEST_LINE_BYTES: Final = 1 << 20
_KILLED_TIMEOUT_S: Final = 10.0

log = logging.getLogger(__name__)


class RayProcess:
    """One such process. It gets SIGTERM when this process ends, and drains what it runs. Start it in the main thread.
    Raises OSError."""

    def __init__(self, task: Task) -> None:
        self._process = subprocess.Popen(
            ending_with_this_process([sys.executable, "-m", "genserve.placement.ray", task.to_json()]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**_ENV, **os.environ},
            process_group=0,  # an interrupt from the terminal is for this process alone
        )
        self._lines = asyncio.StreamReader(limit=_LONGEST_LINE_BYTES)
        self._reading: asyncio.ReadTransport | None = None

    async def next(self) -> frozenset[str] | None:
        """All addresses, when they change; None: the process ends, or has."""
        if self._reading is None:
            lines = self._lines
            self._reading, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(lines), self._process.stdout
            )
        line = await self._lines.readline()
        return addresses_of(line) if line.endswith(b"\n") else None

    async def found(self, first: Collection[str] = ()) -> AsyncGenerator[Collection[str], None]:
        """The addresses that `next` returns until it ends, and again every now and then; `first` are known already."""
        addresses = first
        reading = asyncio.ensure_future(self.next())
        try:
            while True:
                yield addresses
                await asyncio.wait({reading}, timeout=INTERVAL_S)
                if reading.done():
                    changed = reading.result()
                    if changed is None:
                        return
                    addresses = changed
                    reading = asyncio.ensure_future(self.next())
        finally:
            reading.cancel()

    async def ended(self) -> int:
        """Waits until it has ended; its exit status."""
        if (status := self._process.poll()) is not None:
            return status
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        watched = os.pidfd_open(self._process.pid)  # a zombie has one too
        try:
            loop.add_reader(watched, over.set)
            await over.wait()
        finally:
            loop.remove_reader(watched)
            os.close(watched)
        return self._process.wait()

    def stop(self) -> None:
        """Asks it to drain. Does not wait."""
        self._process.terminate()

    def kill(self) -> None:
        """Ray ends what a killed process has left in the cluster. Waits until the process is gone."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_TIMEOUT_S)
        if self._reading is not None:
            self._reading.close()
        elif self._process.stdout is not None:
            self._process.stdout.close()


async def ray_addresses(config: RayConfig) -> AsyncGenerator[Collection[str], None]:
    """The addresses of the daemons of a fleet's actors, now and later. Looks again when the cluster is lost, or is not
    there yet, whatever has ended one look; until then the replicas are those that were found."""
    deaths = Deaths()
    known: Collection[str] = frozenset()
    while True:
        began_s = time.monotonic()
        try:
            process = RayProcess(Task(config))
        except OSError as error:  # no more processes or files: others may end
            say(f"{config.where}: the process that asks it cannot be started: {error}")
        else:
            try:
                async with aclosing(_found(process, config, known)) as found:
                    async for known in found:
                        yield known
            except Exception:  # a fault of ours: nobody else would find replicas
                log.exception("looking for the replicas on %s failed", config.where)
            finally:
                process.kill()
        now_s = time.monotonic()
        wait_s = deaths.add(now_s, now_s - began_s)
        say(f"{config.where}: looking for the replicas again in {wait_s:g} s")
        await asyncio.sleep(wait_s)


async def _found(
    process: RayProcess, config: RayConfig, known: Collection[str]
) -> AsyncGenerator[Collection[str], None]:
    yield known
    try:
        async with asyncio.timeout(config.timeout_s):
            first = await process.next()
    except TimeoutError:
        say(f"{config.where} does not answer within {config.timeout_s:g} s")
        return
    if first is not None:
        async with aclosing(process.found(first)) as found:
            async for addresses in found:
                yield addresses
