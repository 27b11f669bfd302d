"""What one process counts, and the server that shows it, together with what the processes beside it count."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext

from prometheus_client import REGISTRY, CollectorRegistry, disable_created_metrics

from genserve.metrics.calls import CallSeries
from genserve.metrics.exposition import Exposition, Registry
from genserve.metrics.families import Family
from genserve.metrics.http import OPEN, Access, start_metrics_server
from genserve.metrics.loop_lag import LoopLag
from genserve.metrics.processes import count_into, registry_of, shared_directory


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
        """Of a front end that the daemon shows; `name` tells it from the others. None if the daemon shows nothing."""
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
        access: Access = OPEN,
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
    """Those of the daemon, None if nothing is to be shown (port -1). Enter before the engine starts."""
    if port == -1:
        yield None
        return
    with shared_directory() if num_frontends else nullcontext("") as directory:
        yield ProcessMetrics("daemon", directory)
