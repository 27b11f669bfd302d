"""Replicas that a name resolves to."""

import asyncio
import socket
from typing import Any

import pytest

from genserve.fleet.discovery import Discovery, dns_addresses
from tests.fleet.routers import over, replica
from tests.support.patience import until
from tests.support.ports import free_port


async def test_drained_replica_is_added_again_when_a_new_daemon_has_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a container is restarted in place: its address stays in DNS all the time."""
    looks = 0

    async def resolve(host: str, port: int, **options: Any) -> list[tuple[Any, ...]]:
        nonlocal looks
        looks += 1
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async def look_twice() -> None:
        before = looks
        await until(lambda: looks > before + 1)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    async with over([]) as fleet:
        router = fleet.running.router
        port = free_port()
        async with replica(port) as daemon:
            address = daemon.address
            looking = asyncio.create_task(Discovery(router, "", dns_addresses(f"fleet.local:{port}", 0.01)).run())
            await fleet.until_ready(1)
            await fleet.client.drain_replica(address)
            await look_twice()
            assert not router.fleet.upstreams, "the daemon that was drained is still there"
        await look_twice()
        assert not router.fleet.upstreams, "nobody is there"
        async with replica(port):
            await fleet.until_ready(1)
            assert list(router.fleet.upstreams) == [address]
            await fleet.client.remove_replica(address)
            await look_twice()
            assert not router.fleet.upstreams
            await fleet.client.add_replica(address)
            await fleet.until_ready(1)
            await look_twice()
            assert list(router.fleet.upstreams) == [address]
            looking.cancel()
            await asyncio.wait({looking})


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
        await until(lambda: len(router.fleet.upstreams) == 6)
        failure[:] = [UnicodeError("label empty or too long"), socket.gaierror("no such name"), RuntimeError("a fault")]
        await until(lambda: not failure)
        assert len(router.fleet.upstreams) == 6
        found[:] = ["127.0.0.2", "127.0.0.9", "::1"]
        await until(lambda: sorted(router.fleet.upstreams) == ["127.0.0.2:1", "127.0.0.9:1", "[::1]:1"])
        looking.cancel()
        await asyncio.wait({looking})
