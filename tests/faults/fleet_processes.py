"""Real daemons behind a real router, each in a process of its own, at addresses that outlive them."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.support.daemon_process import DaemonProcess
from tests.support.ports import free_port
from tests.support.router_process import RouterProcess

_KV_CACHE_BYTES = 64 << 20


class FleetProcesses:
    """So many daemons on one checkpoint, and their router, beside which another one may stand by. With `keeps` each
    daemon has its versions on a disk of its own."""

    def __init__(
        self,
        checkpoint: Path,
        directory: Path,
        num_replicas: int,
        router_flags: Sequence[str] = (),
        flags: Sequence[str] = (),
        *,
        keeps: bool = False,
    ) -> None:
        self._checkpoint = checkpoint
        self._directory = directory
        self._router_flags = router_flags
        self._flags = flags
        self._keeps = keeps
        self._lives = [0] * num_replicas
        # A daemon may have ended when its port is needed again.
        # In order, because a push goes from the first one to the last.
        self.addresses = sorted(f"127.0.0.1:{free_port()}" for _ in range(num_replicas))
        self.router_address = f"127.0.0.1:{free_port()}"
        self.standby_address = f"127.0.0.1:{free_port()}"
        self.daemons: list[DaemonProcess] = []
        self.router: RouterProcess | None = None
        self.standby: RouterProcess | None = None

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
        self.router = self._routing(self.router_address)

    def start_standby(self) -> None:
        """Another router over the same replicas."""
        self.standby = self._routing(self.standby_address)

    def take_over(self) -> None:
        """Kills the router: the one that stands by is the router from now on."""
        assert self.router is not None and self.standby is not None
        self.router.kill()
        self.router, self.standby = self.standby, None
        self.router_address, self.standby_address = self.standby_address, self.router_address

    def end_standby(self) -> None:
        """If there still is one."""
        if self.standby is not None:
            self.standby.kill()
            self.standby = None

    def _routing(self, address: str) -> RouterProcess:
        replicas = [flag for replica in self.addresses for flag in ("--replica", replica)]
        flags = ["--port", address.rpartition(":")[2], *replicas, *self._router_flags]
        return RouterProcess(flags, self._directory / "router")

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

    def kill_all(self) -> frozenset[int]:
        """All daemons and the router, at once. The versions that are on their disks then, of each the one that it
        starts with, 0 = none."""
        for index in range(len(self.daemons)):
            with suppress(ProcessLookupError):
                self.signal(index, signal.SIGKILL)
        self._kill()
        return self.kept()

    def kept(self) -> frozenset[int]:
        """The versions that the daemons would start with."""
        return frozenset(_kept(self._kept(index)) for index in range(len(self.addresses)))

    def start_all(self) -> None:
        """After they were killed."""
        for index in range(len(self.daemons)):
            self.restart(index)
        self.start_router()

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
        flags += ["--keep-committed", str(self._kept(index))] if self._keeps else []
        return DaemonProcess(flags, self._directory / f"daemon.{index}.{self._lives[index]}")

    def _kept(self, index: int) -> Path:
        return self._directory / f"kept.{index}"

    def _kill(self) -> None:
        for daemon in self.daemons:
            daemon.kill()
        for router in (self.router, self.standby):
            if router is not None:
                router.kill()


def _kept(directory: Path) -> int:
    """What a daemon would start with; one that is wholly written takes the place of the current one."""
    for name in ("writing", "current"):
        with suppress(FileNotFoundError):
            return int(json.loads((directory / name / "genserve.json").read_text())["weight_version"])
    return 0
