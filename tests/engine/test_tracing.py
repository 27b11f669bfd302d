"""Spans from the client through the daemon to vLLM, as a collector gets them: one engine with a front end."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import format_span_id, format_trace_id

from genserve.client import AsyncClient
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.known_secrets import check_told

_LIMIT_S = 60.0  # exporters send every five seconds
_GENERATE = "genserve.v1.GenerationService/Generate"
_TRACER = TracerProvider().get_tracer("test")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what is exported, and looks for secrets in it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.secrets: list[AssertionError] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        try:
            check_told("the spans", str(request))
        except AssertionError as error:
            self.secrets.append(error)
        self.spans += [span for each in request.resource_spans for scope in each.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace_id: str) -> dict[str, Span]:
        """Those of one trace, by their names."""
        return {span.name: span for span in self.spans if span.trace_id.hex() == trace_id}

    async def until(self, trace_id: str, holds: Callable[[dict[str, Span]], bool]) -> dict[str, Span]:
        """Waits for what is exported later."""
        async with asyncio.timeout(_LIMIT_S):
            while not holds(found := self.of(trace_id)):
                await asyncio.sleep(0.1)
        return found


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, str]]:
    """And its address."""
    found, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield found, f"http://127.0.0.1:{port}"
    server.stop(None).wait()
    assert found.spans and not found.secrets


@pytest.fixture(scope="module")
def traced(
    collector: tuple[Collector, str], checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    """A daemon that exports its spans."""
    flags = ["--model", str(checkpoints["a"]), *SMALL_ENGINE, "--frontends", "1", "--ingest-processes", "1"]
    flags += ["--otlp-traces-endpoint", collector[1]]
    process = DaemonProcess(flags, tmp_path_factory.mktemp("tracing") / "stderr")
    try:
        yield process.wait_serving()
    finally:
        process.end()


@pytest.fixture(scope="module")
async def client(traced: DaemonProcess) -> AsyncIterator[AsyncClient]:
    """A client that knows the front end."""
    async with AsyncClient(traced.address) as connected:
        await connected.wait_ready()
        yield connected


async def test_a_request_is_one_trace_from_the_client_to_the_engine(
    client: AsyncClient, collector: tuple[Collector, str]
) -> None:
    """Of the daemon, and of the front end that the second request goes to."""
    for _ in range(2):
        with _TRACER.start_as_current_span("rollout") as span:
            await client.generate("hello", max_tokens=4, ignore_eos=True)
        ids = span.get_span_context()
        found = await collector[0].until(
            format_trace_id(ids.trace_id), lambda spans: {_GENERATE, "llm_request"} <= spans.keys()
        )
        call, engine = found[_GENERATE], found["llm_request"]
        assert call.parent_span_id.hex() == format_span_id(ids.span_id)
        assert engine.parent_span_id == call.span_id
        assert call.start_time_unix_nano <= engine.end_time_unix_nano


async def test_a_push_is_a_span_with_its_steps(
    client: AsyncClient, checkpoints: dict[str, Path], collector: tuple[Collector, str]
) -> None:
    """Through a receiving process, which passes the trace on."""
    with _TRACER.start_as_current_span("training step") as span:
        await client.push_weights(checkpoints["b"], version=1)
    steps = {"prepare", "pause", "commit", "resume"}
    # Each process exports at times of its own, and the call ends last.
    names = {"genserve.v1.WeightService/PushWeights", "push", "receive", *steps}
    found = await collector[0].until(
        format_trace_id(span.get_span_context().trace_id), lambda spans: names <= spans.keys()
    )
    call = found["genserve.v1.WeightService/PushWeights"]
    assert call.parent_span_id.hex() == format_span_id(span.get_span_context().span_id)
    assert found["receive"].parent_span_id == found["push"].parent_span_id == call.span_id
    for name in steps:
        assert found[name].parent_span_id == found["push"].span_id, name
    order = [found[name].start_time_unix_nano for name in ("receive", "prepare", "pause", "commit", "resume")]
    assert order == sorted(order)
    assert "genserve.push_id" in {each.key for each in found["push"].attributes}
