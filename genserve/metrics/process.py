"""Counters of one process, and the server that shows them together with those of the processes beside it.

Calls are counted by method and status, as other gRPC servers do: `grpc_server_*`. One increment when a call begins, and
two when it ends; messages are not counted, because there is one for each token.

With front ends, prometheus_client keeps the counters of each process in files that all of them map, so that the daemon
reads those of a front end without asking it, also when it has died. This is how vLLM counts for several API servers.
Without front ends, counters are ordinary numbers, which are cheaper.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import lru_cache

import prometheus_client.values
from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.values import MultiProcessValue

from genserve.errors import UnauthenticatedError
from genserve.metrics.exposition import OPEN, Exposition, Family, Registry, ScrapeAccess, start_metrics_server
from genserve.process.leftovers import prefix
from genserve.rpc.access import Callers, bearer_token
from genserve.rpc.handlers import Context
from genserve.rpc.observed import Method
from genserve.security.certificates import server_context
from genserve.settings.listen_config import ListenConfig

_CALL_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_METHOD = ("grpc_service", "grpc_method", "grpc_type")
_MAX_SERIES = 4096
"""Far more than methods and statuses make."""
_LAG_INTERVAL_S = 0.25
_LAG_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Where prometheus_client, in this process, keeps its files. vLLM looks at it too."""
_DAEMON = "daemon"


class ProcessMetrics:
    """Of the daemon, a front end or a router, as `process` says. `directory`: where several processes count together,
    "" = this one counts alone. At most one for a process, unless none is shown."""

    def __init__(self, process: str, directory: str = "") -> None:
        self.directory = directory
        # A second series for each one, which nothing here asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self.calls = CallSeries(self._registry)
        """Observes the calls of this process's servers."""
        self._lag = LoopLag(self._registry, process)

    @classmethod
    def of_frontend(cls, directory: str, name: str) -> "ProcessMetrics | None":
        """Of a front end that the daemon shows; `name` identifies it. None if the daemon shows nothing."""
        if not directory:
            return None
        count_into(directory, name)
        return cls("frontend", directory)

    async def run(self) -> None:
        """Measures the event loop. Never returns."""
        await self._lag.run()

    async def serve(
        self,
        host: str,
        port: int,
        read: Callable[[], Iterable[Family]],
        stack: AsyncExitStack,
        access: ScrapeAccess = OPEN,
    ) -> str:
        """Shows everything on a port, until `stack` ends; the URL. `read` has what is counted elsewhere. Raises
        OSError."""
        exposition = Exposition(_Both(self._registry, self.directory), read)
        server = await start_metrics_server(host, port, exposition.text, access)
        stack.push_async_callback(server.stop)
        return f"{'http' if access.tls is None else 'https'}://{server.address}/metrics"


class _Both:
    """The series of this process and of libraries in it; with front ends, also theirs."""

    def __init__(self, own: CollectorRegistry, directory: str) -> None:
        # What several processes count is read from the files of all, with that of this one.
        self._registries: list[Registry] = [registry_of(directory)] if directory else [own, REGISTRY]

    def collect(self) -> Iterable[Family]:
        for each in self._registries:
            yield from each.collect()


@contextmanager
def daemon_metrics(port: int, num_frontends: int) -> Iterator[ProcessMetrics | None]:
    """The metrics of the daemon, None if nothing is to be shown (port -1). Enter before the engine starts."""
    if port == -1:
        yield None
        return
    with shared_directory() if num_frontends else nullcontext("") as directory:
        yield ProcessMetrics("daemon", directory)


class CallSeries:
    """The series of the calls of a process."""

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
            buckets=_CALL_BOUNDS_S,
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
        """Counts a call, and its end when that is reported."""
        started, seconds = self._of(method)
        started.inc()
        began_s = time.monotonic()

        def end(code: str) -> None:
            self._of_status(method, code).inc()
            seconds.observe(time.monotonic() - began_s)

        return end


class LoopLag:
    """Measures the lag of an event loop several times a second. `process` names what runs on it: daemon, frontend or
    router."""

    def __init__(self, registry: CollectorRegistry, process: str) -> None:
        self._seconds = Histogram(
            "genserve_event_loop_lag_seconds",
            "How much later than asked for the event loop called something.",
            ["process"],
            registry=registry,
            buckets=_LAG_BOUNDS_S,
        ).labels(process)

    async def run(self) -> None:
        """Never returns."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._seconds.observe(max(0.0, loop.time() - due_s))


def count_into(directory: str, name: str) -> None:
    """From now on, this process counts in files of its own in the directory. A process of the same `name`, which must
    have ended, is continued. Call before any series are made."""
    os.environ[DIRECTORY_VARIABLE] = directory
    # As prometheus_client's documentation says for processes that are named in another way than by their id. It reads
    # the variable when it is imported, which may have been before the fork.
    prometheus_client.values.ValueClass = MultiProcessValue(process_identifier=lambda: name)  # type: ignore[no-untyped-call]


@contextmanager
def shared_directory() -> Iterator[str]:
    """A directory for the counters of the daemon and of its front ends. This process counts there from now on."""
    directory = tempfile.mkdtemp(prefix=prefix("metrics"))
    try:
        count_into(directory, _DAEMON)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def registry_of(directory: str) -> CollectorRegistry:
    """All series of the processes that count in the directory."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, directory)  # type: ignore[no-untyped-call]
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def access_of(config: ListenConfig, callers: Callers | None) -> ScrapeAccess:
    """The TLS and the callers of the port with the series: those of the other ports of a process. A role that may see
    the state may see the series, and each may."""
    tls = None if config.certificate is None else server_context(config.certificate)
    if callers is None:
        return ScrapeAccess(None, tls)

    def authorize(header: str | None) -> bool:
        try:
            token = bearer_token(() if header is None else (("authorization", header),))
        except UnauthenticatedError:
            return False
        return token is not None and callers.of_token(token) is not None

    return ScrapeAccess(authorize, tls)
