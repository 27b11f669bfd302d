"""Waiting for the replicas of a router."""

import asyncio
import time
from collections.abc import Callable

from genserve.client import AsyncClient, Replicas
from genserve.errors import GenserveError
from tests.support import patience


async def until(
    client: AsyncClient, holds: Callable[[Replicas], bool], timeout_s: float = patience.START_S
) -> Replicas:
    """Waits until something holds for the replicas."""
    last: Replicas | None = None
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            last = await client.list_replicas()
            if holds(last):
                return last
        except GenserveError:
            pass  # the router starts
        await asyncio.sleep(0.05)
    raise AssertionError(f"not within {timeout_s:g} s: {last}")


def all_ready(replicas: Replicas) -> bool:
    """Whether all of them get requests, at the version of the fleet."""
    return bool(replicas.replicas) and all(
        each.state == "ready" and each.engine is not None and each.engine.weight_version == replicas.weight_version
        for each in replicas.replicas
    )


def ready(replicas: Replicas) -> set[str]:
    """Who gets requests."""
    return {each.address for each in replicas.replicas if each.state == "ready"}
