"""The front ends of a daemon: their processes, a client of each, and requests that run at all of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import psutil

from genserve.client import AsyncClient, Generation
from tests.support.daemon_process import DaemonProcess

FOREVER = 1900
"""Tokens of a request that does not end by itself in a test."""


def listening_on(process: psutil.Process) -> set[int]:
    """The TCP ports on which a process listens."""
    try:
        return {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
    except psutil.Error:
        return set()  # it has ended


class PortClient(AsyncClient):
    """Calls this port alone, and looks for no others."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"{host}:{port}")
        self.port = port
        self._frontends.looks_at_s = float("inf")


def on_port(daemon: DaemonProcess, port: int) -> psutil.Process:
    """The front end that serves on a port."""
    children = psutil.Process(daemon.process.pid).children(recursive=True)
    found = [each for each in children if port in listening_on(each)]
    assert len(found) == 1, [(each.pid, each.name(), listening_on(each)) for each in children]
    return found[0]


def frontends_of(daemon: DaemonProcess, clients: Sequence[PortClient]) -> list[psutil.Process]:
    """The processes behind clients of front ends."""
    return [on_port(daemon, each.port) for each in clients]


@asynccontextmanager
async def everywhere_of(address: str, num_frontends: int) -> AsyncIterator[Sequence[PortClient]]:
    """A client of the daemon's own port, and one of each front end, none of which knows of the others."""
    async with AsyncExitStack() as stack:
        async with AsyncClient(address) as asking:
            ports = (await asking.server_info()).frontend_ports
        assert len(set(ports)) == num_frontends
        host, _, own_port = address.rpartition(":")
        clients = [PortClient(host, port) for port in (int(own_port), *ports)]
        for each in clients:
            await stack.enter_async_context(each)
        yield clients


@asynccontextmanager
async def running(clients: Sequence[AsyncClient], **options: Any) -> AsyncIterator[list["asyncio.Task[Generation]"]]:
    """One request to each client, all of which have begun: "r0", "r1" and so on."""
    options = {"max_tokens": FOREVER, "stream_interval": 1, **options}
    begun = [asyncio.Event() for _ in clients]

    async def generate(number: int) -> Generation:
        generation = Generation()
        # Left, and not dropped: the error of a cancelled task would keep it until the garbage collector comes by.
        async with clients[number].stream([number + 1], request_id=f"r{number}", ignore_eos=True, **options) as stream:
            async for delta in stream:
                generation.add(delta)
                begun[number].set()
        return generation

    tasks = [asyncio.create_task(generate(number)) for number in range(len(clients))]
    try:
        for task, each in zip(tasks, begun, strict=True):
            waiting = asyncio.create_task(each.wait())
            await asyncio.wait({task, waiting}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if task.done():
                task.result()
            assert each.is_set()
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def reasons(tasks: Sequence["asyncio.Task[Generation]"]) -> list[str]:
    """How the requests ended."""
    ended = [task.result().sequences[0].finish for task in tasks if await asyncio.wait_for(task, 60)]
    return [finish.reason for finish in ended if finish is not None]
