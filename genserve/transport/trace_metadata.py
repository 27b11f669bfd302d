"""The trace that the caller of a client is in, as metadata: if the caller uses OpenTelemetry, which is not needed."""

import sys
from collections.abc import Sequence

from genserve.observe.trace import HEADERS, headers


def trace_metadata() -> Sequence[tuple[str, str]]:
    """The headers of the current span, or of the call that is being passed on; nothing outside of a trace."""
    found = headers()
    if found is None:
        if "opentelemetry.trace" not in sys.modules:  # then nobody has begun a span
            return ()
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        found = {}
        TraceContextTextMapPropagator().inject(found)
    return tuple((key, found[key]) for key in HEADERS if key in found)
