"""One replica: a daemon that is started again when it ends, and known to the fleet while it serves."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from genserve.errors import ReplicaNotFoundError
from genserve.launcher.daemon_process import DaemonFailedError, DaemonProcess
from genserve.launcher.output import Serving
from genserve.notices import say
from genserve.placement.backoff import Backoff, Starts
from genserve.placement.output import PrefixedOutput
from genserve.placement.shares import ProcessShare

_KILLED_TIMEOUT_S: Final = 15.0


class Daemon(Protocol):
    """One run of a daemon, wherever it runs: what DaemonProcess says of the same names."""

    serving: Future[Serving]
    ended: Future[bool]

    @property
    def exit_status(self) -> int | None: ...

    def stop(self, timeout_s: float) -> None: ...

    def kill(self) -> None: ...

    def failure(self) -> DaemonFailedError: ...


class Members(Protocol):
    """The replicas that serve, by their addresses: a router, say."""

    def add(self, address: str, /) -> object: ...

    async def remove(self, address: str, /) -> None:
        """Raises ReplicaNotFoundError."""


DaemonT = TypeVar("DaemonT", bound=Daemon)


class Replica(ABC, Generic[DaemonT]):
    """Keeps one daemon running, and known to the members while it serves."""

    def __init__(self, number: int, members: Members, starts: Starts) -> None:
        self.number = number
        self._members = members
        self._starts = starts
        self._backoff = Backoff()
        self._process: DaemonT | None = None

    @abstractmethod
    def _start(self) -> DaemonT:
        """Starts it, without waiting until it serves. Raises OSError."""

    async def run(self) -> None:
        """Until it is cancelled, which leaves the daemon as it is. Raises DaemonFailedError if no start is likely to
        succeed, and OSError if no process can be started."""
        num_failed = 0
        while True:
            began_s = time.monotonic()
            process = self._process = self._start()
            try:
                serving = await asyncio.wrap_future(process.serving)
            except DaemonFailedError as error:
                failure = error
                num_failed += 1
            else:
                num_failed = 0
                self._starts.has_served = True
                failure = await self._serving(process, serving.address)
            await asyncio.wrap_future(process.ended)
            if self._starts.is_hopeless(num_failed, failure.exit_status):
                raise failure
            wait_s = self._backoff.after(time.monotonic() - began_s)
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
        was_killed = await asyncio.wrap_future(process.ended)
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

    async def _serving(self, process: DaemonT, address: str) -> DaemonFailedError:
        """From when it serves to its end, of which the error tells."""
        self._members.add(address)
        await asyncio.wrap_future(process.ended)
        with suppress(ReplicaNotFoundError):  # somebody has removed it
            await self._members.remove(address)
        return process.failure()


class LocalReplica(Replica[DaemonProcess]):
    """One whose daemon is a process on this host."""

    def __init__(
        self, number: int, flags: Sequence[str], share: ProcessShare, members: Members, starts: Starts
    ) -> None:
        super().__init__(number, members, starts)
        self._flags = flags
        self._share = share

    def _start(self) -> DaemonProcess:
        output = PrefixedOutput(f"[{self.number}] ")
        return DaemonProcess(self._flags, output, self._share.env, cpus=self._share.cpus)


async def keep(replicas: Sequence[Replica[DaemonT]], stopped: asyncio.Event) -> DaemonFailedError | None:
    """Runs them until a signal (None) or a failure that ends all."""
    waiting = asyncio.create_task(stopped.wait())
    running = [asyncio.create_task(each.run(), name=f"replica {each.number}") for each in replicas]
    try:
        done, _ = await asyncio.wait([waiting, *running], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (waiting, *running):
            task.cancel()
        results = await asyncio.gather(*running, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError | DaemonFailedError):
            raise result
    if waiting in done:
        return None
    return next((each for each in results if isinstance(each, DaemonFailedError)), None)
