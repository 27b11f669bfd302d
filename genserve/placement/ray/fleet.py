"""Runs the replicas of `up` on a cluster, until this process is told to end."""

import asyncio
import os
from typing import Final

from genserve.observe.notices import say
from genserve.placement.config import flags_of_replica
from genserve.placement.ray.addresses import ServingAddresses
from genserve.placement.ray.carried import carried
from genserve.placement.ray.cluster import RayFailedError
from genserve.placement.ray.placement import Placement
from genserve.placement.ray.replica import RayReplica
from genserve.placement.ray.resources import reachable_by_others
from genserve.placement.ray.settings import RayConfig, RayFleet
from genserve.placement.replica import keep

_WRONG_USAGE: Final = 2


async def run_fleet(config: RayConfig, fleet: RayFleet, serving: ServingAddresses, stopped: asyncio.Event) -> int:
    """Reserves what the replicas need, runs them, drains them, and gives all of it back. Returns the exit status.
    Raises RayFailedError if they cannot be placed."""
    placement = await _reserved(config, fleet, stopped)
    if placement is None:
        return 0
    try:
        return await _run(placement, fleet, serving, stopped)
    finally:
        await placement.remove()


async def _reserved(config: RayConfig, fleet: RayFleet, stopped: asyncio.Event) -> Placement | None:
    """None: it was told to end before."""
    reserving = asyncio.create_task(Placement.reserve(config, fleet, carried(os.environ)))
    waiting = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({reserving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        if not reserving.done():
            reserving.cancel()
            await asyncio.wait({reserving})
    return None if reserving.cancelled() else reserving.result()


async def _run(placement: Placement, fleet: RayFleet, serving: ServingAddresses, stopped: asyncio.Event) -> int:
    nodes = await placement.nodes()
    if not fleet.is_open and (others := reachable_by_others(nodes)):
        raise RayFailedError(
            f"the daemons would listen on the addresses of their nodes ({', '.join(others)}), without encryption or "
            "authentication: pass --ssl-certfile and --auth-file, or --allow-insecure, for the router and its replicas",
            _WRONG_USAGE,
        )
    for number, node in enumerate(nodes):
        say(f"replica {number} is on node {node.address}")
    serving.put([])
    any_served = asyncio.Event()
    replicas = [
        RayReplica(number, flags_of_replica(fleet.flags, number), placement, serving, any_served, fleet.start_timeout_s)
        for number in range(fleet.num_replicas)
    ]
    try:
        failure = await keep(replicas, stopped)
    finally:
        in_order = await asyncio.gather(*(each.stop(fleet.stop_timeout_s) for each in replicas))
    if failure is not None:
        say(f"no replica can be started: {failure}")
        return _WRONG_USAGE if failure.exit_status == _WRONG_USAGE else 1
    return 0 if all(in_order) else 1
