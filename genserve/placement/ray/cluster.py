"""The connection to a Ray cluster. Every call to Ray has a deadline."""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar

import ray

from genserve.placement.ray.resources import Node
from genserve.placement.ray.settings import AUTO, RayConfig, namespace_of

P = ParamSpec("P")
T = TypeVar("T")

CALL_TIMEOUT_S: Final = 30.0
"""For a call that Ray answers at once if it answers."""
_CONNECT_TIMEOUT_S: Final = 30.0
"""Without a cluster at the address that was given, Ray would try for minutes."""


class RayFailedError(Exception):
    """Ray cannot do what is needed; the text says why. `exit_status`: 2 if another start would not help."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


async def connect(config: RayConfig) -> None:
    """Connects this process, in the namespace of the fleet. Raises RayFailedError."""
    where = "found" if config.address == AUTO else f"at {config.address}"
    try:
        if config.address != AUTO:
            await within(_CONNECT_TIMEOUT_S, _require_listener, config.address)
        await within(
            _CONNECT_TIMEOUT_S,
            ray.init,
            address=config.address,
            namespace=namespace_of(config.name),
            log_to_driver=True,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # of many types: no cluster, another version, no such host, a token that is wrong
        raise RayFailedError(
            f"no Ray cluster {where} that this host is a node of ({' '.join(str(error).split())}): start one with `ray "
            "start --head`, and let other hosts join it with `ray start --address HEAD:6379`"
        ) from error


def _require_listener(address: str) -> None:
    """Raises OSError, or ValueError, at once where Ray would try to connect for a long time."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()


async def within(timeout_s: float, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a call that blocks. Raises RayFailedError when it does not return in time; then it goes on in its
    thread."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.to_thread(function, *args, **kwargs)
    except TimeoutError:
        name = getattr(function, "__name__", "a call")
        raise RayFailedError(f"Ray does not answer within {timeout_s:g} s ({name})") from None


async def nodes() -> list[Node]:
    """Those that are alive."""
    return [Node.of(each) for each in await within(CALL_TIMEOUT_S, ray.nodes) if each["Alive"]]


async def free() -> Mapping[str, float]:
    """The resources that nothing uses, of all nodes together."""
    found: Mapping[str, float] = await within(CALL_TIMEOUT_S, ray.available_resources)
    return found


async def actor_names() -> list[str]:
    """The names of all actors of the fleet."""
    found: list[str] = await within(CALL_TIMEOUT_S, ray.util.list_named_actors)
    return found


async def disconnect() -> None:
    """Ends the job, with all that is left of it. A cluster that does not answer ends it when it sees this process
    gone."""
    with suppress(RayFailedError):
        await within(CALL_TIMEOUT_S, ray.shutdown)
