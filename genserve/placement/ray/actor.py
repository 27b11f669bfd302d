"""What runs on a node of the cluster: an actor that has a daemon."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import ray

from genserve.launcher.daemon_process import DaemonFailedError, DaemonProcess
from genserve.launcher.output import Serving
from genserve.placement.output import PrefixedOutput
from genserve.placement.shares import ProcessShare, core_shares_here

_OMP: Final = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a daemon has ended, as DaemonFailedError says it."""

    words: str
    exit_status: int | None = None
    was_killed: bool = False


class ReplicaActor:
    """Runs one daemon at a time, as a process, on the address of its node. The kernel ends the daemon with this
    process, however that ends, if Ray does not. Who starts the daemon again is the driver."""

    def __init__(self, number: int, env: Mapping[str, str]) -> None:
        """`env`: of the daemon, in addition to what the node has."""
        self._number = number
        # Ray sets it to the CPUs that it counts for the actor, so that its workers do not take the threads of others.
        os.environ.pop(_OMP, None)
        os.environ.update(env)
        self._process: DaemonProcess | None = None

    def __repr__(self) -> str:
        return f"replica {self._number}"

    async def start(self, flags: Sequence[str], index: int, num_here: int) -> None:
        """Starts the daemon. It is one of `num_here` replicas on this node, which share its cores if their engines run
        on the CPU. Raises OSError."""
        if self._process is not None and not self._process.ended.done():
            raise RuntimeError("the daemon of this replica runs already")
        has_gpus = bool(ray.get_gpu_ids())
        share = ProcessShare() if has_gpus else core_shares_here(flags, num_here)[index]
        # Ray starts its workers with the lowest priority but four. A daemon would stand still beside any other program.
        with suppress(PermissionError):  # only root may raise it
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        listening = [f"--host={ray.util.get_node_ip_address()}", "--port=0"]
        self._process = DaemonProcess(
            [*listening, *flags], PrefixedOutput(f"[{self._number}] "), share.env, cpus=share.cpus
        )

    async def serving(self) -> Serving | None:
        """Waits until it serves; None: it has ended before."""
        try:
            return await asyncio.wrap_future(self._daemon().serving)
        except DaemonFailedError:
            return None

    async def ended(self) -> Ending:
        """Waits until it and all that it has started have ended."""
        process = self._daemon()
        was_killed = await asyncio.wrap_future(process.ended)
        failure = process.failure()
        return Ending(str(failure), failure.exit_status, was_killed)

    async def address(self) -> str:
        """Where it serves; "" if it does not."""
        process = self._process
        if process is None or process.exit_status is not None or not process.serving.done():
            return ""
        return process.serving.result().address if process.serving.exception() is None else ""

    async def stop(self, timeout_s: float) -> None:
        """Lets it drain, and kills what is left after that time. Does not wait: `ended` does."""
        if self._process is not None:
            self._process.stop(timeout_s)

    def _daemon(self) -> DaemonProcess:
        if self._process is None:
            raise RuntimeError("no daemon was started")
        return self._process
