"""Families of series, made of numbers that were counted elsewhere; the text that a scraper gets; and the HTTP server
that sends it: GET /metrics, and nothing else.

The text is made in a thread, and at most once in a while however many ask. The server shares the event loop with token
streams, so everything that a client can make it do is bounded: connections, the size of a request, the time to send
one, and the time to read the answer. A connection is for one request.
"""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import accumulate
from typing import Final, Protocol, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.utils import floatToGoString

from genserve.net import bound_socket, joined
from genserve.observe.histogram import Histogram

Family: TypeAlias = Metric
"""Series of one name."""
Labelled = Iterable[tuple[Sequence[str], float]]
"""Values of labels, and the number that they have."""

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
MIN_INTERVAL_S = 1.0
"""Between two texts. To make one takes the interpreter for tens of milliseconds if there are many series of vLLM's."""


def gauge(name: str, help: str, value: float) -> Family:
    """A number that rises and falls."""
    return GaugeMetricFamily(name, help, value=value)


def gauges(name: str, help: str, labels: Sequence[str], values: Labelled) -> Family:
    """Such a number for each value of the labels."""
    family = GaugeMetricFamily(name, help, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def counter(name: str, help: str, value: float) -> Family:
    """A number that only rises; its series is `name`_total."""
    return CounterMetricFamily(name, help, value=value)


def counters(name: str, help: str, labels: Sequence[str], values: Labelled) -> Family:
    """Such a number for each value of the labels."""
    family = CounterMetricFamily(name, help, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def histogram(name: str, help: str, values: Histogram) -> Family:
    """How large values were."""
    return HistogramMetricFamily(name, help, buckets=_buckets(values), sum_value=values.sum)


def histograms(name: str, help: str, label: str, values: Mapping[str, Histogram]) -> Family:
    """How large values were, for each value of the label."""
    family = HistogramMetricFamily(name, help, labels=[label])
    for label_value, each in values.items():
        family.add_metric([label_value], _buckets(each), each.sum)
    return family


def _buckets(values: Histogram) -> list[tuple[str, float]]:
    names = [*map(_name, values.bounds), "+Inf"]
    return list(zip(names, accumulate(values.counts), strict=True))


def _name(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


class Registry(Protocol):
    """As in prometheus_client."""

    def collect(self) -> Iterable[Family]:
        """All families."""


class Exposition:
    """The series of `registry`, which may be collected in a thread, and what `read` returns, which is called on the
    event loop."""

    def __init__(
        self, registry: Registry, read: Callable[[], Iterable[Family]], min_interval_s: float = MIN_INTERVAL_S
    ) -> None:
        self._registry = registry
        self._read = read
        self._min_interval_s = min_interval_s
        self._text = b""
        self._until_s = float("-inf")
        self._turn = asyncio.Lock()

    async def text(self) -> bytes:
        """The series as they are now, or were a moment ago."""
        async with self._turn:
            if time.monotonic() >= self._until_s:
                families = _Families(list(self._read()), self._registry)
                self._text = await asyncio.to_thread(generate_latest, families)
                self._until_s = time.monotonic() + self._min_interval_s
            return self._text


class _Families:
    def __init__(self, read: list[Family], registry: Registry) -> None:
        self._read = read
        self._registry = registry

    def collect(self) -> Iterable[Family]:
        yield from self._read
        yield from self._registry.collect()


MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 8 << 10
REQUEST_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
_PATH = "/metrics"

Authorize = Callable[[str | None], bool]
"""Whether the value of an Authorization header, None if there is none, may see the series."""


@dataclass(frozen=True, slots=True)
class ScrapeAccess:
    """The access to the scrapes. `authorize`: checks a scraper; None = all may scrape. `tls`: None = plain HTTP."""

    authorize: Authorize | None = None
    tls: ssl.SSLContext | None = None


OPEN = ScrapeAccess()


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
    host: str, port: int, text: Callable[[], Awaitable[bytes]], access: ScrapeAccess = OPEN
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
