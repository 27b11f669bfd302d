"""Real daemons behind a real router, each in a process of its own, at addresses that outlive them."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.daemon_process import DaemonProcess
from tests.support.ports import free_port
from tests.support.router_process import RouterProcess

_KV_CACHE_BYTES = 64 << 20


class FleetProcesses:
    """So many daemons on one checkpoint, and their router."""

    def __init__(
        self,
        checkpoint: Path,
        directory: Path,
        num_replicas: int,
        router_flags: Sequence[str] = (),
        flags: Sequence[str] = (),
    ) -> None:
        self._checkpoint = checkpoint
        self._directory = directory
        self._router_flags = router_flags
        self._flags = flags
        self._lives = [0] * num_replicas
        # A daemon may have ended when its port is needed again.
        # In order, because a push goes from the first one to the last.
        self.addresses = sorted(f"127.0.0.1:{free_port()}" for _ in range(num_replicas))
        self.router_address = f"127.0.0.1:{free_port()}"
        self.daemons: list[DaemonProcess] = []
        self.router: RouterProcess | None = None

    @contextmanager
    def running(self) -> Iterator["FleetProcesses"]:
        """Everything runs inside the block, and is killed behind it."""
        with ExitStack() as stack:
            stack.callback(self._kill)
            self.daemons = [self._started(index) for index in range(len(self.addresses))]
            for daemon in self.daemons:
                daemon.wait_serving()
            self.start_router()
            yield self

    def start_router(self) -> None:
        """At the same address as before."""
        replicas = [flag for address in self.addresses for flag in ("--replica", address)]
        port = self.router_address.rpartition(":")[2]
        flags = ["--port", port, *replicas, *self._router_flags]
        self.router = RouterProcess(flags, self._directory / "router")

    def restart_router(self) -> None:
        """After a kill."""
        assert self.router is not None
        self.router.kill()
        self.start_router()

    def kill(self, index: int) -> None:
        """A daemon with its engine."""
        self.daemons[index].kill()

    def restart(self, index: int) -> None:
        """With its checkpoint, as an orchestrator would; does not wait until it serves."""
        self._lives[index] += 1
        self.daemons[index] = self._started(index)

    def signal(self, index: int, number: signal.Signals) -> None:
        """Sends a signal to a daemon and its engine."""
        os.killpg(self.daemons[index].process.pid, number)

    @property
    def log(self) -> str:
        """What the router said."""
        return (self._directory / "router").read_text(errors="replace")

    def _started(self, index: int) -> DaemonProcess:
        flags = ["--model", str(self._checkpoint), "--max-model-len", "2048"]
        flags += ["--kv-cache-memory-bytes", str(_KV_CACHE_BYTES)]
        flags += ["--port", self.addresses[index].rpartition(":")[2], *self._flags]
        return DaemonProcess(flags, self._directory / f"daemon.{index}.{self._lives[index]}")

    def _kill(self) -> None:
        for daemon in self.daemons:
            daemon.kill()
        if self.router is not None:
            self.router.kill()
