"""Who observes the calls of a process: who counts them, and who traces them."""

from collections.abc import Sequence

from genserve.metrics.process import ProcessMetrics
from genserve.rpc.observed import CallObserver
from genserve.tracing.spans import CallSpans


def observers_of(metrics: ProcessMetrics | None, *, traced: bool) -> Sequence[CallObserver]:
    """Those of a daemon or a front end. `traced`: spans are exported, which from now on steps have too."""
    observers: list[CallObserver] = [] if metrics is None else [metrics.calls]
    if traced:
        spans = CallSpans()
        spans.trace_steps()
        observers.append(spans)
    return observers
