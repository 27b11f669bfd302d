"""A small HTTP server for scrapers: GET /metrics, and nothing else.

It shares the event loop with token streams, so everything that a client can make it do is bounded: connections, the
size of a request, the time to send one, and the time to read the answer. A connection is for one request.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

from genserve.metrics.exposition import CONTENT_TYPE
from genserve.net import bound_socket, joined

MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 8 << 10
REQUEST_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
_PATH = "/metrics"

Authorize = Callable[[str | None], bool]
"""Whether the value of an Authorization header, None if there is none, may see the series."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may scrape: everybody who connects, without `authorize`; `tls`: None = plain HTTP."""

    authorize: Authorize | None = None
    tls: ssl.SSLContext | None = None


OPEN = Access()


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A server that listens at `address`."""

    address: str
    _server: asyncio.Server
    _answerer: "_Answerer"

    async def stop(self) -> None:
        """Ends it, and what it is answering."""
        self._server.close()
        self._answerer.abort()
        await self._server.wait_closed()


async def start_metrics_server(
    host: str, port: int, text: Callable[[], Awaitable[bytes]], access: Access = OPEN
) -> MetricsServer:
    """Listens on a port, 0 = a free one. Raises OSError naming an address that cannot be used, and --metrics-port."""
    answerer = _Answerer(text, access.authorize)
    listener = bound_socket(host, port, "--metrics-port")
    try:
        server = await asyncio.start_server(
            answerer.answer,
            sock=listener,
            limit=MAX_REQUEST_BYTES,
            ssl=access.tls,
            ssl_handshake_timeout=None if access.tls is None else REQUEST_TIMEOUT_S,
            backlog=MAX_CONNECTIONS,
        )
    except BaseException:
        listener.close()
        raise
    return MetricsServer(joined(host, listener.getsockname()[1]), server, answerer)


class _Answerer:
    def __init__(self, text: Callable[[], Awaitable[bytes]], authorize: Authorize | None) -> None:
        self._text = text
        self._authorize = authorize
        self._connections: set[asyncio.StreamWriter] = set()

    def abort(self) -> None:
        for each in self._connections:
            each.transport.abort()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(writer)
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await _read_request(reader)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                writer.write(await self._response(request))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, TimeoutError):
            pass  # it has sent nothing, or does not read
        finally:
            self._connections.discard(writer)
            writer.transport.abort()

    async def _response(self, request: "_Request | None") -> bytes:
        if request is None:
            return _encoded(HTTPStatus.BAD_REQUEST)
        if self._authorize is not None and not self._authorize(request.authorization):
            return _encoded(HTTPStatus.UNAUTHORIZED, extra="WWW-Authenticate: Bearer\r\n")
        if request.path != _PATH:
            return _encoded(HTTPStatus.NOT_FOUND)
        if request.method not in ("GET", "HEAD"):
            return _encoded(HTTPStatus.METHOD_NOT_ALLOWED, extra="Allow: GET, HEAD\r\n")
        text = await self._text()
        return _encoded(HTTPStatus.OK, text, CONTENT_TYPE, with_body=request.method == "GET")


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    authorization: str | None


async def _read_request(reader: asyncio.StreamReader) -> _Request | None:
    """The request; None if it is none, or is too long."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    authorization = None
    for line in lines:
        name, _, value = line.partition(":")
        if name.lower() == "authorization":
            authorization = value.strip()
    return _Request(words[0], words[1].partition("?")[0], authorization)


def _encoded(
    status: HTTPStatus,
    body: bytes | None = None,
    content_type: str = "text/plain; charset=utf-8",
    *,
    extra: str = "",
    with_body: bool = True,
) -> bytes:
    body = f"{status.phrase}\n".encode() if body is None else body
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"Connection: close\r\n{extra}\r\n"
    )
    return head.encode() + (body if with_body else b"")
