"""Spans of calls on a real server, and of the steps in them."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from genserve.errors import QueueFullError
from genserve.observe import trace
from genserve.observe.log_lines import REQUEST_ID
from genserve.rpc.observed import ObservedCalls
from genserve.rpc.services import ServiceTable
from genserve.tracing import CallSpans
from tests.support.patience import until

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
GENERATE = "/genserve.v1.GenerationService/Generate"
CHECK = "/grpc.health.v1.Health/Check"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[CallSpans]:
    """With the steps."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    observer = CallSpans(provider.get_tracer("test"))
    observer.trace_steps()
    yield observer
    trace.trace_steps(None)


@asynccontextmanager
async def served(spans: CallSpans, behavior: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A server with two methods."""
    server, table = grpc.aio.server(interceptors=[ObservedCalls([spans])]), ServiceTable()
    server.add_generic_rpc_handlers((table,))
    for path in (GENERATE, CHECK):
        _, service, name = path.split("/")
        table.add_registered_method_handlers(service, {name: grpc.unary_unary_rpc_method_handler(behavior)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


def ids(span: ReadableSpan) -> tuple[str, str, str | None]:
    """Of the trace, of the span, and of the one above."""
    above = None if span.parent is None else f"{span.parent.span_id:016x}"
    assert span.context is not None
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}", above


async def ended(exporter: InMemorySpanExporter, count: int) -> Sequence[ReadableSpan]:
    """So many spans. That of a call ends when its answer has been sent, of which the client may know before."""
    await until(lambda: len(exporter.get_finished_spans()) >= count)
    return exporter.get_finished_spans()


async def test_call_is_a_span_of_its_callers_trace_and_reaches_the_engine(
    spans: CallSpans, exporter: InMemorySpanExporter
) -> None:
    """Steps are below it, one below the other; ids of requests are attributes."""
    passed_on: list[Any] = []

    async def behavior(request: bytes, context: Any) -> bytes:
        passed_on.append(trace.headers())
        REQUEST_ID.set("r1")
        with trace.step("outer"), trace.step("inner"):
            pass
        return b""

    async with served(spans, behavior) as channel:
        await channel.unary_unary(GENERATE)(b"", metadata=(("traceparent", PARENT),))
    inner, outer, call = await ended(exporter, 3)
    trace_id, call_id, above = ids(call)
    assert (trace_id, above) == (TRACE_ID, SPAN_ID)
    assert passed_on == [{"traceparent": f"00-{TRACE_ID}-{call_id}-01"}]
    assert (ids(outer)[2], ids(inner)[2]) == (call_id, ids(outer)[1])
    assert call.name == GENERATE[1:]
    attributes = dict(call.attributes or {})
    assert attributes["rpc.method"] == "Generate" and attributes["rpc.grpc.status"] == "OK"
    assert attributes["genserve.request_id"] == "r1"


async def test_a_failed_call_and_a_failed_step_are_errors(spans: CallSpans, exporter: InMemorySpanExporter) -> None:
    """By the status, and by the class: a message may contain what is no one else's business."""

    async def behavior(request: bytes, context: Any) -> bytes:
        with trace.step("work"):
            raise QueueFullError("secret", retry_after_s=1.0)

    async with served(spans, behavior) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(GENERATE)(b"")
    work, call = await ended(exporter, 2)
    assert (work.status.status_code, work.status.description) == (StatusCode.ERROR, "QueueFullError")
    assert (call.status.status_code, call.status.description) == (StatusCode.ERROR, "RESOURCE_EXHAUSTED")
    assert "secret" not in call.to_json() + work.to_json()


async def test_probes_begin_no_trace_but_may_belong_to_one(spans: CallSpans, exporter: InMemorySpanExporter) -> None:
    """Otherwise most traces would be those of health checks."""

    async def behavior(request: bytes, context: Any) -> bytes:
        return b""

    async with served(spans, behavior) as channel:
        await channel.unary_unary(CHECK)(b"")
        assert exporter.get_finished_spans() == ()
        await channel.unary_unary(CHECK)(b"", metadata=(("traceparent", PARENT),))
    found = await ended(exporter, 1)
    assert [ids(each)[2] for each in found] == [SPAN_ID]
