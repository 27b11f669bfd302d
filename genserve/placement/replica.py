"""One replica on this host: a daemon that is started again when it ends."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import Final

from genserve.errors import ReplicaNotFoundError
from genserve.fleet.router import Router
from genserve.launcher.daemon_process import DaemonFailedError, DaemonProcess
from genserve.notices import say
from genserve.placement.backoff import Backoff, Starts
from genserve.placement.output import PrefixedOutput
from genserve.placement.shares import ProcessShare

_KILLED_TIMEOUT_S: Final = 15.0


class LocalReplica:
    """Keeps one daemon running, and known to the router while it serves."""

    def __init__(self, number: int, flags: Sequence[str], share: ProcessShare, router: Router, starts: Starts) -> None:
        self.number = number
        self._flags = flags
        self._share = share
        self._router = router
        self._starts = starts
        self._backoff = Backoff()
        self._process: DaemonProcess | None = None

    async def run(self) -> None:
        """Until it is cancelled, which leaves the daemon as it is. Raises DaemonFailedError if no start is likely to
        succeed."""
        num_failed = 0
        while True:
            served_s = 0.0
            try:
                process, address = await self._started()
            except DaemonFailedError as error:
                failure = error
                num_failed += 1
            else:
                num_failed = 0
                self._starts.has_served = True
                began_s = time.monotonic()
                failure = await self._serving(process, address)
                served_s = time.monotonic() - began_s
            if self._starts.is_hopeless(num_failed, failure.exit_status):
                raise failure
            wait_s = self._backoff.after(served_s)
            say(f"replica {self.number}: {failure}; it is started again in {wait_s:g} s")
            await asyncio.sleep(wait_s)

    async def stop(self, timeout_s: float) -> bool:
        """Lets the daemon drain; what is left of it after that time is killed. Returns whether it ended in order: one
        that did not serve yet has nothing to drain, and what it has started may have to be killed."""
        process = self._process
        if process is None:
            return True
        served = process.exit_status is None and process.serving.done() and process.serving.exception() is None
        process.stop(timeout_s)
        was_killed = await _ended(process)
        if served and was_killed:
            say(f"replica {self.number}: the daemon, or a process of it, did not end by itself, and was killed")
        return not (served and was_killed)

    def kill(self) -> None:
        """Ends the daemon and everything that it has started. Does not wait."""
        if self._process is not None:
            self._process.kill()

    def wait_killed(self) -> None:
        """Waits after `kill`, but not for a process that hangs in a driver."""
        if self._process is not None:
            wait({self._process.ended}, _KILLED_TIMEOUT_S)

    async def _started(self) -> tuple[DaemonProcess, str]:
        """A new daemon, and where it serves. Raises DaemonFailedError when it has ended without."""
        process = self._start()
        try:
            serving = await asyncio.wrap_future(process.serving)
        except (DaemonFailedError, OSError):
            await _ended(process)  # only then all that it has said is known
            raise process.failure() from None
        return process, serving.address

    def _start(self) -> DaemonProcess:
        try:
            output = PrefixedOutput(f"[{self.number}] ")
            try:
                process = DaemonProcess(self._flags, output, self._share.env, cpus=self._share.cpus)
            except BaseException:
                output.close()
                raise
        except (OSError, RuntimeError) as error:  # no more processes, files or threads: others may end
            raise DaemonFailedError(f"the daemon cannot be started: {error}", PrefixedOutput.path) from error
        self._process = process
        return process

    async def _serving(self, process: DaemonProcess, address: str) -> DaemonFailedError:
        """From when it serves to its end, of which the error tells."""
        self._router.add(address)
        await _ended(process)
        with suppress(ReplicaNotFoundError):  # somebody has removed it
            await self._router.remove(address)
        return process.failure()


async def _ended(process: DaemonProcess) -> bool:
    """When the daemon and all that it has started have ended: whether they were killed."""
    try:
        return await asyncio.wrap_future(process.ended)
    except OSError:  # who looks after it can open no more files: it kills it then
        return True
