"""Counts calls by method and status, as other gRPC servers do: `grpc_server_*`.

One increment when a call begins, and two when it ends; messages are not counted, because there is one for each token.
"""

import time
from collections.abc import Callable
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Histogram

from genserve.rpc.handlers import Context
from genserve.rpc.observed import Method

_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_METHOD = ("grpc_service", "grpc_method", "grpc_type")
_MAX_SERIES = 4096
"""Far more than methods and statuses make."""


class CallSeries:
    """The series of a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        started = Counter("grpc_server_started", "Calls that have begun.", _METHOD, registry=registry)
        handled = Counter(
            "grpc_server_handled", "Calls that have ended, by status.", (*_METHOD, "grpc_code"), registry=registry
        )
        seconds = Histogram(
            "grpc_server_handling_seconds",
            "Seconds from the beginning of a call to its end, those of a stream included.",
            _METHOD,
            registry=registry,
            buckets=_BOUNDS_S,
        )

        # Kept, because prometheus_client would look each one up under a lock.
        @lru_cache(_MAX_SERIES)
        def of(method: Method) -> tuple[Counter, Histogram]:
            labels = method.service, method.name, method.type
            return started.labels(*labels), seconds.labels(*labels)

        @lru_cache(_MAX_SERIES)
        def of_status(method: Method, code: str) -> Counter:
            return handled.labels(method.service, method.name, method.type, code)

        self._of = of
        self._of_status = of_status

    def begun(self, method: Method, context: "Context | None") -> Callable[[str], None]:
        """Counts a call, and its end when that is told."""
        started, seconds = self._of(method)
        started.inc()
        began_s = time.monotonic()

        def end(code: str) -> None:
            self._of_status(method, code).inc()
            seconds.observe(time.monotonic() - began_s)

        return end
