"""One replica: a daemon that is kept going, and known to the fleet while it listens."""

import asyncio
import sys
import time
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Final, Generic, Protocol, TypeVar

from genserve.aio import cancel_all
from genserve.errors import ReplicaNotFoundError
from genserve.launcher.daemon_process import GIVE_UP_S, DaemonFailedError, DaemonProcess
from genserve.launcher.output import Serving
from genserve.observe.notices import can_rewrite, rewrite, say
from genserve.placement.config import START_TIMEOUT_S
from genserve.placement.output import PrefixedOutput
from genserve.placement.shares import ProcessShare
from genserve.process.supervisor import Deaths, Supervised

_REFUSED: Final = 2
"""The exit status of a daemon whose flags or model no start accepts."""
_TELL_AFTER_S: Final = 60.0
_KILLED_TIMEOUT_S: Final = 15.0
_REDRAW_S: Final = 1.0


class Daemon(Protocol):
    """One run of a daemon, wherever it runs: what DaemonProcess says of the same names."""

    serving: Future[Serving]
    ended: Future[bool]

    @property
    def exit_status(self) -> int | None: ...

    def stop(self, timeout_s: float) -> None: ...

    def kill(self) -> None: ...

    def failure(self, what: str = "") -> DaemonFailedError: ...


class Members(Protocol):
    """The replicas that listen, by their addresses: a router, say."""

    def add(self, address: str, /) -> object: ...

    async def remove(self, address: str, /) -> None:
        """Raises ReplicaNotFoundError."""


DaemonT = TypeVar("DaemonT", bound=Daemon)


class Replica(Supervised, Generic[DaemonT]):
    """One daemon at a time, which is known to the members while it serves, and before as soon as it is known where it
    listens. `any_served`: set when one of the replicas has served. `start_timeout_s`: a daemon that does not serve
    within it is ended, and started again. `tell_after_s`: what a start waits for is told after this time, and then each
    time that it has taken twice as long."""

    failure: DaemonFailedError | None = None
    """Of the last daemon that has ended."""

    def __init__(
        self,
        number: int,
        members: Members,
        any_served: asyncio.Event,
        start_timeout_s: float = START_TIMEOUT_S,
        tell_after_s: float = _TELL_AFTER_S,
    ) -> None:
        self.number = number
        self._members = members
        self._any_served = any_served
        self._start_timeout_s = start_timeout_s
        self._tell_after_s = tell_after_s
        self._process: DaemonT | None = None
        self._address = ""

    def __str__(self) -> str:
        return f"replica {self.number}"

    @abstractmethod
    def _start(self) -> DaemonT:
        """Starts it, without waiting until it serves. Raises OSError or RuntimeError if it cannot be."""

    @property
    def _last_line(self) -> str:
        """Its last line of output, if this process has read one."""
        return ""

    async def start(self) -> None:
        """Raises DaemonFailedError."""
        try:
            self._process, address = await self._started()
        except DaemonFailedError as error:
            self.failure = error
            await self._leave()
            raise
        self._any_served.set()
        self._join(address)

    async def ended(self) -> str:
        """With its last words."""
        assert self._process is not None
        await _ended(self._process)
        await self._leave()
        self.failure = self._process.failure()
        return str(self.failure)

    def is_given_up(self, deaths: Deaths) -> bool:
        """Only while no replica has served: what is wrong is likely to be wrong with all starts. Status 2 of a daemon
        is enough then."""
        status = None if self.failure is None else self.failure.exit_status
        return not self._any_served.is_set() and (deaths.are_too_many or status == _REFUSED)

    def tell_given_up(self, how: str) -> None:
        """Tells people why all end: as long as none has served, this is as good as all replicas."""
        say(f"no replica can be started: {how}")

    @property
    def serves(self) -> bool:
        """Whether its daemon runs, and has said that it serves."""
        process = self._process
        return (
            process is not None
            and process.exit_status is None
            and process.serving.done()
            and process.serving.exception() is None
        )

    async def stop(self, timeout_s: float) -> bool:
        """Lets the daemon drain; what is left of it after that time is killed. Returns whether it ended in order: one
        that did not serve yet has nothing to drain, and what it has started may have to be killed."""
        process = self._process
        if process is None:
            return True
        served = self.serves
        process.stop(timeout_s)
        was_killed = await _ended(process)
        if served and was_killed:
            say(f"{self}: the daemon, or a process of it, did not end by itself, and was killed")
        return not (served and was_killed)

    def kill(self) -> None:
        """Ends the daemon and everything that it has started. Does not wait."""
        if self._process is not None:
            self._process.kill()

    def wait_killed(self) -> None:
        """Waits after `kill`, but not for a process that hangs in a driver."""
        if self._process is not None:
            wait({self._process.ended}, _KILLED_TIMEOUT_S)

    async def _started(self) -> tuple[DaemonT, str]:
        """A new daemon, and where it serves. Raises DaemonFailedError when it has ended without."""
        try:
            process = self._process = self._start()
        except (OSError, RuntimeError) as error:  # no more processes, files or threads: others may end
            raise DaemonFailedError(f"the daemon cannot be started: {error}", PrefixedOutput.path) from error
        try:
            serving = await self._until_serving(process)
        except (DaemonFailedError, OSError):
            await _ended(process)  # only then all that it has said is known
            raise process.failure() from None
        if serving is None:
            failure = process.failure(f"the daemon did not serve within {self._start_timeout_s:g} s (--start-timeout)")
            process.stop(GIVE_UP_S)
            await _ended(process)
            raise failure
        return process, serving.address

    async def _until_serving(self, process: DaemonT) -> Serving | None:
        """Its line, or None if it does not come in time. Tells people now and then what is waited for."""
        limit_s, waited_s, tell_s = self._start_timeout_s, 0.0, self._tell_after_s
        while waited_s < limit_s:
            if waited_s > 0:
                said = f"it last said: {self._last_line}" if self._last_line else "it has said nothing"
                after = f"after {waited_s:g} s, and may take {limit_s:g} s (--start-timeout)"
                say(f"{self}: the daemon does not serve {after}; {said}")
            until_s = min(tell_s, limit_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(until_s - waited_s):
                    return await asyncio.wrap_future(process.serving)
            waited_s, tell_s = until_s, 2 * until_s
        return None

    def _join(self, address: str) -> None:
        if address != self._address:  # otherwise it is known, or somebody has removed it
            self._address = address
            self._members.add(address)

    async def _leave(self) -> None:
        address, self._address = self._address, ""
        if address:
            with suppress(ReplicaNotFoundError):  # somebody has removed it
                await self._members.remove(address)


class LocalReplica(Replica[DaemonProcess]):
    """One whose daemon is a process on this host."""

    def __init__(
        self,
        number: int,
        flags: Sequence[str],
        share: ProcessShare,
        members: Members,
        any_served: asyncio.Event,
        start_timeout_s: float = START_TIMEOUT_S,
        tell_after_s: float = _TELL_AFTER_S,
    ) -> None:
        super().__init__(number, members, any_served, start_timeout_s, tell_after_s)
        self._flags = flags
        self._share = share
        self._output: PrefixedOutput | None = None

    def _start(self) -> DaemonProcess:
        loop = asyncio.get_running_loop()

        def listens(address: str) -> None:
            loop.call_soon_threadsafe(self._listens, output, address)

        self._output = output = PrefixedOutput(f"[{self.number}] ", listens=listens)
        try:
            return DaemonProcess(self._flags, output, self._share.env, cpus=self._share.cpus)
        except BaseException:
            output.close()
            raise

    def _listens(self, output: PrefixedOutput, address: str) -> None:
        """The progress of a daemon that has no engine yet."""
        process = self._process
        if output is self._output and process is not None and not process.ended.done() and not self._address:
            self._join(address)

    @property
    def _last_line(self) -> str:
        return "" if self._output is None else self._output.last_line


async def _ended(process: Daemon) -> bool:
    """When the daemon and all that it has started have ended: whether they were killed."""
    try:
        return await asyncio.wrap_future(process.ended)
    except OSError:  # who looks after it can open no more files: it kills it then
        return True


async def show_starts(replicas: Sequence[Replica[DaemonT]]) -> None:
    """Says on a terminal how many serve, and since when they start, until all do."""
    if not can_rewrite(sys.stderr):
        return
    began_s = time.monotonic()
    while (num_serving := sum(each.serves for each in replicas)) < len(replicas):
        rewrite(f"{num_serving} of {len(replicas)} replicas serve, {time.monotonic() - began_s:.0f} s since the start")
        await asyncio.sleep(_REDRAW_S)
    say(f"all replicas serve after {time.monotonic() - began_s:.0f} s")


async def keep(replicas: Sequence[Replica[DaemonT]], stopped: asyncio.Event) -> DaemonFailedError | None:
    """Runs them until a signal (None) or until one is given up: its failure, which ends all."""
    waiting = asyncio.create_task(stopped.wait())
    running = {asyncio.create_task(each.run(), name=str(each)): each for each in replicas}
    try:
        done, _ = await asyncio.wait([waiting, *running], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all([waiting, *running])
    ended = [task for task in running if task in done]
    for task in ended:
        task.result()  # an error is a fault of ours
    return None if waiting in done else running[ended[0]].failure
