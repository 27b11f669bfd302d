"""The composition root of `genserve up --ray`: a router, and the process that runs its replicas on Ray, from the
router's side; and the replicas that it finds for a router that does not run them. Imports no Ray.

Start: Ray places all replicas, then the router listens, then each replica is added when it serves. Stop: the router
drains, then every daemon, then what was reserved is given back.
"""

import asyncio
import importlib.util
import logging
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Final

from genserve.fleet.discovery import INTERVAL_S
from genserve.fleet.serve import start_router
from genserve.launcher.end_with_starter import ending_with_this_process
from genserve.net import require_free
from genserve.observe.notices import say
from genserve.placement.config import UpConfig
from genserve.placement.ray.settings import RayConfig, RayFleet, Task, addresses_of
from genserve.placement.shares import gpus_each, ranks_per_replica
from genserve.placement.up import access_flags, drain_router, time_flags
from genserve.process.signals import Stopped, ending, stop_on_signals
from genserve.process.supervisor import Deaths
from genserve.security.access_list import listed_environment

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


_CONNECT_S: Final = 60.0
"""For a process that imports Ray, and for Ray to answer it."""
_GIVE_BACK_S: Final = 60.0
"""For Ray, when all daemons have ended."""


async def up_on_ray(config: UpConfig, ray: RayConfig) -> int:
    """Serves until a signal, or until no replica can be started or the cluster is lost. Returns the exit status. Raises
    ValueError for flags that cannot be."""
    logging.basicConfig(level=logging.INFO, format="genserve: %(message)s", stream=sys.stderr)
    stopped = Stopped()
    fleet, environment = fleet_of(config), listed_environment()
    require_free(config.route.host, config.route.port, config.route.uds)  # placing takes long
    async with AsyncExitStack() as stack:
        process = RayProcess(Task(ray, fleet))
        stack.callback(process.kill)  # whatever happens, Ray is told of the end
        stack.enter_context(stop_on_signals(stopped.signal, process.kill))
        ended = asyncio.create_task(process.ended())
        waiting = asyncio.create_task(stopped.wait())
        first = asyncio.create_task(process.next())
        for task in (ended, waiting, first):
            stack.callback(task.cancel)
        limit_s = _CONNECT_S + ray.timeout_s
        await asyncio.wait({first, waiting}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if first.done() and (addresses := first.result()) is not None:
            async with AsyncExitStack() as routing:
                found = {ray.where: process.found(addresses)}
                running = await start_router(config.route, routing, stopped, found, environment)
                where = f"{fleet.num_replicas} replica{'s' if fleet.num_replicas != 1 else ''} on {ray.where}"
                print(f"genserve: routing to {where} on {running.address}", flush=True)
                await asyncio.wait({ended, waiting}, return_when=asyncio.FIRST_COMPLETED)
                await drain_router(running, stopped, config)
        elif stopped.is_set():
            say(f"{stopped.cause}: giving back what was reserved; a second signal exits at once")
        elif not first.done():
            say(f"{ray.where} does not answer within {limit_s:g} s")
            return 1
        status = await _status(process, ended, stopped, fleet.stop_timeout_s)
    return status


async def _status(
    process: RayProcess, ended: "asyncio.Task[int]", stopped: asyncio.Event, stop_timeout_s: float
) -> int:
    """Ends the process in order. Returns its exit status, as that of this one."""
    if not ended.done() and stopped.is_set():
        process.stop()
    done, _ = await asyncio.wait({ended}, timeout=stop_timeout_s + _GIVE_BACK_S)
    if not done:
        say("the replicas on Ray did not end in time: Ray ends them")
        return 1
    status = ended.result()
    if status < 0 or (status == 0 and not stopped.is_set()):
        say(f"the process that runs the replicas on Ray {ending(status)}")
        return 1
    return status


def fleet_of(config: UpConfig) -> RayFleet:
    """The resources that it needs: a CPU for each worker of an engine, and its GPU. Raises ValueError."""
    if importlib.util.find_spec("vllm") is None:  # imports nothing
        if config.gpus_each is None:
            raise ValueError("no engine is installed here that tells whether it needs GPUs: say --gpus-per-replica")
        num_gpus = config.gpus_each
    else:
        num_gpus = gpus_each(config.flags, config.gpus_each)
    num_ranks = num_gpus if num_gpus else ranks_per_replica(config.flags)
    flags = [*access_flags(config.route), *time_flags(config.route), *config.flags]
    return RayFleet(
        num_replicas=config.num_replicas,
        flags=flags,
        cpus=1 if num_ranks is None else num_ranks,
        gpus=num_gpus,
        is_open=config.route.may_be_reached,
        start_timeout_s=config.start_timeout_s,
        stop_timeout_s=config.stop_timeout_s,
    )
