"""The connections that the streams of a push go over."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

import grpc.aio

from genserve.net.addresses import is_socket
from genserve.transport.connection import Connection

# Smaller pushes do not ask the daemon for further ports: they would be over by then.
MIN_BYTES: Final = 64 << 20
CONNECT_TIMEOUT_S: Final = 2.0


class PushChannels:
    """Gives each stream a connection: to one of the daemon's receiving processes if it can be reached, else to the
    daemon itself. `ports` are those of the processes, on the daemon's host."""

    def __init__(self, connection: Connection, ports: Sequence[int] = ()) -> None:
        self._connection = connection
        host, colon, _ = connection.target.rpartition(":")
        is_tcp = bool(colon) and not is_socket(connection.target)
        self._targets = [f"{host}:{port}" for port in ports] if is_tcp else []

    async def open(self, count: int, stack: AsyncExitStack) -> list[grpc.aio.Channel]:
        """A connection for each of `count` streams, closed by `stack`. Streams on one connection would take turns and
        share one window."""
        channels = []
        for index in range(count):
            channel = await self._ingest(index, stack)
            if channel is None and index == 0:
                channel = self._connection.channel  # it is open already
            elif channel is None:
                channel = await stack.enter_async_context(self._connection.another_channel())
            channels.append(channel)
        return channels

    async def _ingest(self, index: int, stack: AsyncExitStack) -> grpc.aio.Channel | None:
        if not self._targets:
            return None
        target = self._targets[index % len(self._targets)]
        channel = await stack.enter_async_context(self._connection.another_channel(target))
        try:
            with self._connection.typed_errors():
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await channel.channel_ready()
        except TimeoutError:
            # If one is behind a firewall or another address, all are, and none is tried again.
            self._targets = []
            return None
        return channel
