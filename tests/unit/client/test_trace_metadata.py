"""The trace of a caller goes along with its calls."""

import subprocess
import sys

import pytest
from opentelemetry import trace as otel
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from genserve.transport.connection import Connection
from genserve.transport.trace_metadata import trace_metadata

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_call_within_a_span_names_it_and_another_one_does_not() -> None:
    """Beside the metadata of the client."""
    connection = Connection("127.0.0.1:1", token="t")
    context = SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, False, TraceFlags(1))
    with otel.use_span(NonRecordingSpan(context)):
        assert connection.metadata == (("authorization", "Bearer t"), ("traceparent", PARENT))
    assert connection.metadata == (("authorization", "Bearer t"),)
    assert trace_metadata() == ()


@pytest.mark.slow
def test_a_client_imports_no_opentelemetry() -> None:
    """A program that does not use it does not have to have it."""
    program = (
        "import sys, genserve.client\n"
        "from genserve.transport.trace_metadata import trace_metadata\n"
        "assert trace_metadata() == ()\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
