"""The composition root of `genserve up --ray`: a router, and the process that runs its replicas on Ray.

Start: Ray places all replicas, then the router listens, then each replica is added when it serves. Stop: the router
drains, then every daemon, then what was reserved is given back.
"""

import asyncio
import importlib.util
import logging
import sys
from contextlib import AsyncExitStack
from typing import Final

from genserve.fleet.serve import start_router
from genserve.net import require_free
from genserve.observe.notices import say
from genserve.placement.config import UpConfig
from genserve.placement.ray.process import RayProcess
from genserve.placement.ray.settings import RayConfig, RayFleet, Task
from genserve.placement.shares import gpus_each, ranks_per_replica
from genserve.placement.up import access_flags, drain_router
from genserve.process.signals import Stopped, ending, stop_on_signals
from genserve.security.access_list import listed_environment

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
    """What it needs: a CPU for each worker of an engine, and its GPU. Raises ValueError."""
    if importlib.util.find_spec("vllm") is None:  # imports nothing
        if config.gpus_each is None:
            raise ValueError("no engine is installed here that tells whether it needs GPUs: say --gpus-per-replica")
        num_gpus = config.gpus_each
    else:
        num_gpus = gpus_each(config.flags, config.gpus_each)
    num_ranks = num_gpus if num_gpus else ranks_per_replica(config.flags)
    flags = [*access_flags(config.route), f"--drain-timeout-s={config.route.drain_timeout_s}", *config.flags]
    return RayFleet(
        num_replicas=config.num_replicas,
        flags=flags,
        cpus=1 if num_ranks is None else num_ranks,
        gpus=num_gpus,
        is_open=config.route.may_be_reached,
        start_timeout_s=config.start_timeout_s,
        stop_timeout_s=config.stop_timeout_s,
    )
