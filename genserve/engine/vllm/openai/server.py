"""The OpenAI server: starts its process, starts it again when it ends, and ends it with the daemon.

The daemon holds the listener. So the port stays the same, and clients that connect while no process runs wait for the
next one.
"""

import asyncio
import os
import signal
import ssl
from collections.abc import Callable
from typing import Any, Final

import zmq

from genserve.addresses import joined
from genserve.backoff import Backoff
from genserve.engine.vllm.openai.launch import Launch
from genserve.engine.vllm.openai.relay import Relay
from genserve.signals import ending

_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S: Final = 5.0
_FIRST_DELAY_S: Final = 1.0
_MAX_DELAY_S: Final = 60.0
_STEADY_S: Final = 60.0
"""A process that has run for so long is not counted as one that fails."""
_MAX_FAILURES: Final = 8
_PROBE: Final = b"GET /health HTTP/1.0\r\n\r\n"


class OpenAIServer:
    """One process at a time. `say` prints messages for people."""

    def __init__(self, launch: Launch, relay: Relay, say: Callable[[str], None]) -> None:
        self._launch = launch
        self._relay = relay
        self._say = say
        self._process: Any = None  # of multiprocessing
        self._ended = asyncio.Event()
        self._ended.set()
        self._how_ended = ""  # for people
        self._relaying: asyncio.Task[None] | None = None
        self._refuses = False
        self._host, self.port = launch.listener.getsockname()[:2]

    def __str__(self) -> str:
        scheme = "http" if self._launch.flags.ssl_certfile is None else "https"
        return f"{scheme}://{joined(self._host, self.port)}"

    async def start(self, stopped: asyncio.Event) -> None:
        """Returns when it serves, or when the daemon is to stop. Raises RuntimeError if its process ends before, or if
        it does not serve in time."""
        self._relaying = asyncio.create_task(self._relay.run(), name="openai-outputs")
        self._open()
        waiting = [asyncio.create_task(each) for each in (self._ended.wait(), stopped.wait(), self._answer())]
        try:
            done, _ = await asyncio.wait(waiting, timeout=_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise RuntimeError(f"the OpenAI server does not answer after {_START_TIMEOUT_S:g} s")
            if self._ended.is_set():
                raise RuntimeError(f"the OpenAI server {self._how_ended} while it started")
            for each in done:
                each.result()
        finally:
            for each in waiting:
                each.cancel()

    async def run(self) -> None:
        """Starts the process again when it ends: at first after a second, then ever later. Gives up when it has ended
        eight times without having run for a minute. Never returns; raises what has ended the relay."""
        assert self._relaying is not None
        keeping = asyncio.create_task(self._keep(), name="openai-process")
        try:
            await asyncio.wait({self._relaying, keeping}, return_when=asyncio.FIRST_COMPLETED)
            (self._relaying if self._relaying.done() else keeping).result()
        finally:
            keeping.cancel()

    def refuse(self) -> None:
        """Accepts no more requests. The process ends when it has answered those that it has."""
        self._refuses = True
        self._launch.listener.close()
        self._signal(signal.SIGTERM)

    async def wait_ended(self) -> None:
        """Returns when the process has ended. May be cancelled."""
        await self._ended.wait()

    def kill(self) -> None:
        """Ends the process at once, and starts no other one."""
        self._refuses = True
        self._launch.listener.close()
        self._signal(signal.SIGKILL)

    async def stop(self) -> None:
        """Ends the process, and kills it if it does not end."""
        self.refuse()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self.wait_ended()
        except TimeoutError:
            self.kill()
            await self.wait_ended()
        self._relay.shut()
        if self._relaying is not None:
            self._relaying.cancel()
            await asyncio.wait({self._relaying})

    async def _keep(self) -> None:
        clock = asyncio.get_running_loop().time
        num_failures, began_s, backoff = 0, clock(), Backoff(_FIRST_DELAY_S, _MAX_DELAY_S)
        while True:
            await self._end_of_process()
            self._relay.shut()
            if clock() - began_s >= _STEADY_S:
                num_failures = 0
                backoff.reset()
            num_failures += 1
            if self._refuses or num_failures == _MAX_FAILURES:
                break
            delay_s = backoff.next_s()
            self._say(f"openai: the server {self._how_ended}; it is started again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            began_s = clock()
            if not self._refuses:
                self._open_again()
        if not self._refuses:
            self._launch.listener.close()
            self._say(f"openai: the server {self._how_ended}, after {num_failures} starts: it is not started again")
        await asyncio.Event().wait()  # the daemon serves on without it

    def _open_again(self) -> None:
        """Starts another process. What the machine has not got now, files or processes, it may have later: this is as
        if that process had ended."""
        try:
            self._open()
        except (OSError, zmq.ZMQError) as error:
            self._how_ended = f"could not be started: {error}"

    def _open(self) -> None:
        """Starts a process."""
        place = self._relay.open()
        try:
            self._process = self._launch.start(place)
        except BaseException:
            self._relay.shut()
            raise
        self._ended.clear()
        place.requests.close()  # the process has them now
        place.outputs.close()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._has_ended, self._process)

    def _has_ended(self, process: Any) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()  # its end of the sentinel is closed when it is a zombie
        self._how_ended = ending(process.exitcode)
        self._ended.set()

    async def _end_of_process(self) -> None:
        """Returns when it has ended. Kills it if it does not behave."""
        ended, broken = (asyncio.create_task(each.wait()) for each in (self._ended, self._relay.broken))
        try:
            await asyncio.wait({ended, broken}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                self._say(f"openai: the server is ended: {self._relay.why_broken}")
                self._signal(signal.SIGKILL)
            await ended
        finally:
            ended.cancel()
            broken.cancel()

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.is_set():
            os.kill(self._process.pid, number)  # waited for by nobody but `_has_ended`: the id is still its own

    async def _answer(self) -> None:
        """Returns when HTTP is served. Until a process accepts it, a connection waits in the listener."""
        flags, context = self._launch.flags, None
        if flags.ssl_certfile is not None:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is our own process
        try:
            reader, writer = await asyncio.open_connection(self._host, self.port, ssl=context)
            try:
                writer.write(_PROBE)
                if await reader.read(1):
                    return
            finally:
                writer.close()
        except (ssl.SSLError, ConnectionError):
            if flags.ssl_cert_reqs != ssl.CERT_NONE:
                return  # it wants a certificate, so it is there
        await self._ended.wait()  # it has accepted the connection, and died
