"""The replicas of a fleet on Ray, for a router that does not run them. Imports no Ray."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing

from genserve.observe.notices import say
from genserve.placement.ray.process import RayProcess
from genserve.placement.ray.settings import RayConfig, Task
from genserve.process.supervisor import Deaths

log = logging.getLogger(__name__)


async def ray_addresses(config: RayConfig) -> AsyncGenerator[Collection[str], None]:
    """Those of its actors' daemons, now and later. Looks again when the cluster is lost, or is not there yet, whatever
    has ended one look; until then the replicas are those that were found."""
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
