"""The replicas of a fleet on a cluster: runs those of `up`, or finds those that somebody else runs, until this process
is told to end."""

import asyncio
import os
from typing import Any, Final

import ray
from ray.exceptions import RayError

from genserve.observe.notices import say
from genserve.placement.config import flags_of_replica
from genserve.placement.ray.cluster import CALL_TIMEOUT_S, Placement, RayFailedError, actor_names, within
from genserve.placement.ray.replica import RayReplica
from genserve.placement.ray.resources import carried, reachable_by_others
from genserve.placement.ray.settings import RayConfig, RayFleet, ServingAddresses, replica_number
from genserve.placement.replica import keep

_WRONG_USAGE: Final = 2

_INTERVAL_S: Final = 2.0
_ANSWER_S: Final = 5.0
"""An actor that Ray starts again does not answer. It is asked again at the next look."""


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
    """None if it was asked to end before."""
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
        return _WRONG_USAGE if failure.exit_status == _WRONG_USAGE else 1
    return 0 if all(in_order) else 1


async def find_fleet(serving: ServingAddresses, stopped: asyncio.Event) -> int:
    """Writes the addresses whenever they change, until this process is asked to end. Returns the exit status. Raises
    RayFailedError if the cluster does not answer."""
    told: set[str] | None = None
    while not stopped.is_set():
        names = [name for name in await actor_names() if replica_number(name) is not None]
        answers = await asyncio.gather(*map(_address, names))
        if (found := set(answers) - {""}) != told:
            told = found
            serving.put(found)
        try:
            async with asyncio.timeout(_INTERVAL_S):
                await stopped.wait()
        except TimeoutError:
            continue
    return 0


async def _address(name: str) -> str:
    """Where the daemon of an actor serves; "" if it does not, or the actor does not say."""
    try:
        actor: Any = await within(CALL_TIMEOUT_S, ray.get_actor, name)
        async with asyncio.timeout(_ANSWER_S):
            address: str = await actor.address.remote()
    except (RayError, ValueError, TimeoutError):  # ValueError: it is gone by now
        return ""
    return address
