"""The bare client reads what a server writes, however it is cut into packets."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from bench.peers.http_calls import HttpCalls
from bench.processes import PeerError
from bench.traces import Trace, Work

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [
    {"choices": [{"token_ids": [5], "text": "a", "logprobs": {"token_logprobs": [-0.5]}}]},
    {"choices": [{"token_ids": [6], "text": "b", "logprobs": {"content": [{"logprob": -1.5}]}}]},
    {"choices": [{"token_ids": [], "text": "c"}]},
]


def chunked(data: bytes, size: int) -> bytes:
    """In chunks of so many bytes, and the end."""
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])


def stream(chunk_bytes: int) -> bytes:
    """A whole answer of server-sent events."""
    events = [b"data: " + json.dumps(each).encode() + b"\n\n" for each in EVENTS]
    return HEAD + chunked(b"".join([*events, b"data: [DONE]\n\n"]), chunk_bytes)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[bytes, int], Awaitable[int]]]:
    """Starts a server that answers each request with these bytes, so many at a time; its port."""
    servers = []

    async def start(answer: bytes, at_once: int) -> int:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                for begin in range(0, len(answer), at_once):
                    writer.write(answer[begin : begin + at_once])
                    await writer.drain()
                    await asyncio.sleep(0)

        async def until_gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handle(reader, writer)
            except asyncio.IncompleteReadError:
                writer.close()

        server = await asyncio.start_server(until_gone, "127.0.0.1", 0)
        servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    yield start
    for server in servers:
        server.close()


async def generated(port: int, peer: str, work: Work) -> list[Trace]:
    """The traces of one peer."""
    calls = HttpCalls(port, "model")
    try:
        async with asyncio.timeout(60):
            return await calls.generate(peer, work)
    finally:
        await calls.close()


@pytest.mark.parametrize("at_once", [1, 7, 100_000])
@pytest.mark.parametrize("chunk_bytes", [3, 50, 100_000])
@pytest.mark.parametrize("peer", ["vllm_http", "vllm_http_bare"])
async def test_every_event_is_read(
    serve: Callable[[bytes, int], Awaitable[int]], peer: str, chunk_bytes: int, at_once: int
) -> None:
    """Whichever client asks; the next request goes over the same connection."""
    port = await serve(stream(chunk_bytes), at_once)
    for trace in await generated(port, peer, Work([[1], [2]], 1, 2, outputs="text")):
        assert (trace.token_ids, trace.logprobs, trace.texts) == ([5, 6], [-0.5, -1.5], ["a", "b", "c"])
        assert trace.sent_at <= trace.arrived_at[0] <= trace.arrived_at[1]


async def test_an_answer_that_is_no_stream_is_read(serve: Callable[[bytes, int], Awaitable[int]]) -> None:
    """Of its stated length."""
    body = json.dumps(EVENTS[0]).encode()
    port = await serve(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body), 5)
    (trace,) = await generated(port, "rust_http_final", Work([[1]], 1, 1, final_only=True, outputs="logprobs"))
    assert (trace.token_ids, trace.logprobs, trace.texts) == ([5], [-0.5], [])


async def test_an_answer_that_refuses_fails_the_run(serve: Callable[[bytes, int], Awaitable[int]]) -> None:
    """With what the server said."""
    port = await serve(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", 1000)
    with pytest.raises(PeerError, match="404 Not Found"):
        await generated(port, "rust_http_tokens", Work([[1]], 1, 1))


async def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    """As servers do with one that is idle between two rounds."""
    num_connections = 0

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(stream(1000))
        writer.close()

    async with await asyncio.start_server(answer_once, "127.0.0.1", 0) as server:
        calls = HttpCalls(server.sockets[0].getsockname()[1], "model")
        async with asyncio.timeout(60):
            for _ in range(2):
                await calls.generate("vllm_http_bare", Work([[1]], 1, 2))
                (connection,) = calls.idle_connections
                while connection.is_open:
                    await asyncio.sleep(0)
        await calls.close()
    assert num_connections == 2
