"""Spans of OpenTelemetry, for each call and for each step in it. The only place of a server that knows opentelemetry.

vLLM's --otlp-traces-endpoint turns it on. vLLM makes the exporter, in each process that has a client of the engine, and
these spans go the same way as its own."""

from collections.abc import Callable
from typing import Any

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from genserve.observe.log_lines import noted
from genserve.observe.trace import End, headers, keep_headers, trace_steps, use_headers
from genserve.rpc.handlers import Context
from genserve.rpc.observed import Method

_W3C = TraceContextTextMapPropagator()
_TRACED = frozenset({"genserve.v1.GenerationService", "genserve.v1.WeightService"})
"""Services whose calls begin a trace if they belong to none. Others would fill the traces: probes, and polls of the
state."""
_NO_ERRORS = frozenset({"OK", "CANCELLED"})
_IDS = ("request_id", "push_id")


class CallSpans:
    """Observes calls. `tracer`: None = that of the process."""

    def __init__(self, tracer: trace.Tracer | None = None) -> None:
        self._tracer = trace.get_tracer("genserve") if tracer is None else tracer

    def begun(self, method: Method, context: "Context | None") -> Callable[[str], None]:
        """Begins a span, to which the steps of the call and the engine's belong."""
        if context is None:
            return _nothing
        keep_headers(context.invocation_metadata() or ())
        came_with = headers()
        if came_with is None and method.service not in _TRACED:
            return _nothing
        attributes = {"rpc.system": "grpc", "rpc.service": method.service, "rpc.method": method.name}
        parent = None if came_with is None else _W3C.extract(came_with)
        span = self._tracer.start_span(
            f"{method.service}/{method.name}", parent, kind=SpanKind.SERVER, attributes=attributes
        )
        inside = trace.set_span_in_context(span, parent)
        otel.attach(inside)  # for this task, which ends with the call
        going_on: dict[str, str] = {}
        _W3C.inject(going_on, inside)
        use_headers(going_on)

        def end(code: str) -> None:
            span.set_attribute("rpc.grpc.status", code)
            _add_ids(span)
            if code not in _NO_ERRORS:
                span.set_status(Status(StatusCode.ERROR, code))
            span.end()

        return end

    def trace_steps(self) -> None:
        """From now on each step has a span too, under that of its call or of the step around it."""
        trace_steps(self._begin_step)

    def _begin_step(self, name: str) -> End:
        span = self._tracer.start_span(name)
        token = otel.attach(trace.set_span_in_context(span))

        def end(error: BaseException | None) -> None:
            otel.detach(token)
            _add_ids(span)
            if error is not None:
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            span.end()

        return end


def _add_ids(span: Span) -> None:
    known: dict[str, Any] = noted()
    for name in _IDS:
        if name in known:
            span.set_attribute(f"genserve.{name}", known[name])


def _nothing(code: str) -> None:
    """For a call that is not traced."""
