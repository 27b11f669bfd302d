"""Replicas that a name resolves to."""

import asyncio
import socket
from typing import Any

import pytest

from genserve.fleet.discovery import Discovery, dns_addresses
from tests.fleet.routers import over


async def test_the_replicas_follow_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that are gone and do not answer are removed at the next look; no failure ends the looking."""
    found: list[str] = [f"127.0.0.{number}" for number in range(2, 8)]
    failure: list[Exception] = []

    async def resolve(host: str, port: int, **options: Any) -> list[tuple[Any, ...]]:
        if failure:
            raise failure.pop()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in [*found, *found]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    async with over([]) as fleet:
        router = fleet.running.router
        discovery = Discovery(router, "fleet.local", dns_addresses("fleet.local:1", 0.05))
        looking = asyncio.create_task(discovery.run())
        await fleet.until(lambda: len(router.fleet.upstreams) == 6)
        failure[:] = [UnicodeError("label empty or too long"), socket.gaierror("no such name")]
        await fleet.until(lambda: not failure)
        assert len(router.fleet.upstreams) == 6
        found[:] = ["127.0.0.2", "127.0.0.9", "::1"]
        await fleet.until(lambda: sorted(router.fleet.upstreams) == ["127.0.0.2:1", "127.0.0.9:1", "[::1]:1"])
        looking.cancel()
        await asyncio.wait({looking})
