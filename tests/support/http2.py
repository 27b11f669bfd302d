"""A client that speaks HTTP/2 and nothing else, and need not speak it well."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
"""Types of frames."""
ACK = END_STREAM = 1
END_HEADERS = 4
"""Flags."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER_BYTES = 9


def frame_bytes(kind: int, flags: int, payload: bytes = b"", stream: int = 0) -> bytes:
    """A frame: its length, type, flags and stream, and what it carries. Stream 0 is the connection."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def frame_of(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """The next one: its type, its flags and what it carries."""
    head = await reader.readexactly(_HEADER_BYTES)
    return head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))


def call_headers(path: str, **more: str) -> bytes:
    """The headers that begin a call of gRPC."""
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost"}
    headers |= {"content-type": "application/grpc", "te": "trailers", **more}
    return b"".join(literal(name, value) for name, value in headers.items())


def literal(name: str, value: str) -> bytes:
    """A header in HPACK, neither indexed nor compressed."""
    return b"\x00" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    data = text.encode()
    length, encoded = len(data), b""
    if length < 127:
        return bytes([length]) + data
    rest = length - 127
    while rest >= 128:
        encoded += bytes([rest % 128 + 128])
        rest //= 128
    return b"\x7f" + encoded + bytes([rest]) + data


@asynccontextmanager
async def connected(
    address: str, timeout_s: float = 10.0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that has said hello, with empty settings; for so long at most."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE + frame_bytes(SETTINGS, 0))
    try:
        async with asyncio.timeout(timeout_s):
            yield reader, writer
    finally:
        writer.close()
