"""Finds the actors of a fleet that somebody else runs, by their names."""

import asyncio
from typing import Any, Final

import ray
from ray.exceptions import RayError

from genserve.placement.ray.addresses import ServingAddresses
from genserve.placement.ray.cluster import CALL_TIMEOUT_S, actor_names, within
from genserve.placement.ray.names import replica_number

_INTERVAL_S: Final = 2.0
_ANSWER_S: Final = 5.0
"""An actor that Ray starts again does not answer. It is asked again at the next look."""


async def find_fleet(serving: ServingAddresses, stopped: asyncio.Event) -> int:
    """Tells the addresses whenever they change, until this process is told to end. Returns the exit status. Raises
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
