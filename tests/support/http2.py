"""A client that speaks HTTP/2 and nothing else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.scripted_daemon import Daemon

SETTINGS, PING, GOAWAY = 4, 6, 7
"""Types of frames."""
ACK = 1
"""A flag."""
_HEADER_BYTES = 9


def frame_bytes(kind: int, flags: int, payload: bytes = b"") -> bytes:
    """A frame of the connection: its length, type, flags and stream, and what it carries."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + bytes(4) + payload


async def frame_of(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """The next one: its type, its flags and what it carries."""
    head = await reader.readexactly(_HEADER_BYTES)
    return head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))


@asynccontextmanager
async def connected(daemon: Daemon) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that has said hello, with empty settings; for ten seconds at most."""
    host, port = daemon.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame_bytes(SETTINGS, 0))
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.close()
