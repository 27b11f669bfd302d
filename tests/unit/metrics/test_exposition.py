"""What a scraper gets, and what it can ask of the server."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from genserve.metrics import exposition
from genserve.metrics.exposition import (
    MAX_CONNECTIONS,
    MAX_REQUEST_BYTES,
    Exposition,
    ScrapeAccess,
    counter,
    gauges,
    histogram,
    start_metrics_server,
)
from genserve.observe.histogram import Histogram


async def test_what_is_read_and_what_is_registered_are_one_text() -> None:
    """A scraper parses it."""
    registry = CollectorRegistry()
    Counter("calls", "Calls.", ["code"], registry=registry).labels("OK").inc()
    values = Histogram([1.0, 2.5])
    values.add(2.0)
    values.add(9.0)
    read = [counter("pushes", "P.", 3), gauges("phase", "F.", ["phase"], [(["A"], 1)]), histogram("s", "S.", values)]
    text = (await Exposition(registry, lambda: read).text()).decode()
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert samples == {
        ("pushes_total",): 3,
        ("phase", "A"): 1,
        ("s_bucket", "1.0"): 0,
        ("s_bucket", "2.5"): 1,
        ("s_bucket", "+Inf"): 2,
        ("s_count",): 2,
        ("s_sum",): 11,
        ("calls_total", "OK"): 1,
    }


async def test_scrapers_that_ask_together_or_too_often_get_one_text() -> None:
    """However many there are, the work is bounded; afterwards there is a new one."""
    num_reads = 0

    def read() -> list:  # type: ignore[type-arg]
        nonlocal num_reads
        num_reads += 1
        return [counter("reads", "R.", num_reads)]

    often = Exposition(CollectorRegistry(), read, min_interval_s=60.0)
    texts = await asyncio.gather(*(often.text() for _ in range(20)))
    assert (len(set(texts)), num_reads) == (1, 1)
    always = Exposition(CollectorRegistry(), read, min_interval_s=0.0)
    assert await always.text() != await always.text()


TEXT = b"up 1\n"


@dataclass
class Scraped:
    """A server, and how often it was asked for its text."""

    address: str
    num_texts: int = 0

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, head: str) -> tuple[int, bytes]:
        """The status and the body of the answer to a request."""
        reader, writer = await self.connect()
        writer.write(head.encode())
        answer = await reader.read()
        writer.close()
        status, _, body = answer.partition(b"\r\n\r\n")
        return int(status.split(b" ")[1]), body


@asynccontextmanager
async def scraped(access: ScrapeAccess = exposition.OPEN) -> AsyncIterator[Scraped]:
    async def text() -> bytes:
        found.num_texts += 1
        return TEXT

    server = await start_metrics_server("127.0.0.1", 0, text, access)
    found = Scraped(server.address)
    try:
        yield found
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        ("GET /metrics?a=b HTTP/1.0\r\n\r\n", 200),
        ("GET / HTTP/1.1\r\n\r\n", 404),
        ("GET /metrics/../x HTTP/1.1\r\n\r\n", 404),
        ("POST /metrics HTTP/1.1\r\n\r\n", 405),
        ("GET /metrics\r\n\r\n", 400),
        ("\r\n\r\n", 400),
        (f"GET /metrics HTTP/1.1\r\nX: {'y' * MAX_REQUEST_BYTES}\r\n\r\n", 400),
    ],
)
async def test_only_get_metrics_is_answered_with_the_series(head: str, status: int) -> None:
    """Everything else is refused without collecting them."""
    async with scraped() as server:
        answered, body = await server.ask(head)
        assert (answered, body == TEXT, server.num_texts) == (status, status == 200, int(status == 200))


async def test_head_tells_the_length_without_the_series() -> None:
    """As HTTP wants it."""
    async with scraped() as server:
        assert await server.ask("HEAD /metrics HTTP/1.1\r\n\r\n") == (200, b"")


@pytest.mark.parametrize(
    ("header", "status"),
    [("", 401), ("Authorization: Bearer wrong\r\n", 401), ("AUTHORIZATION:  Bearer right \r\n", 200)],
)
async def test_unauthorized_scraper_gets_nothing(header: str, status: int) -> None:
    """The header is given to whoever decides, as it came."""
    async with scraped(ScrapeAccess(lambda given: given == "Bearer right")) as server:
        assert (await server.ask(f"GET /metrics HTTP/1.1\r\n{header}\r\n"))[0] == status
        assert (await server.ask("GET /other HTTP/1.1\r\n\r\n"))[0] == 401
        assert server.num_texts == int(status == 200)


async def test_a_client_that_sends_no_request_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for it for ever."""
    monkeypatch.setattr(exposition, "REQUEST_TIMEOUT_S", 0.05)
    async with scraped() as server:
        reader, writer = await server.connect()
        writer.write(b"GET /metr")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


async def test_connections_beyond_the_limit_are_closed_and_later_ones_served() -> None:
    """Idle ones cannot keep a scraper out for longer than the time for a request."""
    async with scraped() as server:
        held = [await server.connect() for _ in range(MAX_CONNECTIONS)]
        for _, writer in held:
            writer.write(b"GET")
            await writer.drain()
        reader, writer = await server.connect()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        for reader, each in held:
            each.write(b" /metrics HTTP/1.1\r\n\r\n")
            assert TEXT in await reader.read()
            each.close()
        assert (await server.ask("GET /metrics HTTP/1.1\r\n\r\n"))[0] == 200


async def test_server_with_tls_answers_only_tls() -> None:
    """The context is the caller's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    async with scraped(ScrapeAccess(tls=context)) as server:
        reader, writer = await server.connect()
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert TEXT not in await reader.read()
        writer.close()


async def test_an_address_in_use_is_named_with_its_flag() -> None:
    """The daemon says it and does not start."""
    async with scraped() as server:

        async def text() -> bytes:
            return b""

        with pytest.raises(OSError, match=rf"127.0.0.1:{server.port} \(--metrics-port\)"):
            await start_metrics_server("127.0.0.1", server.port, text)
