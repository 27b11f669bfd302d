"""A TCP link to a daemon that can be cut, as the kernel cuts it when the process at one end is killed, or can fall
silent, as when a host vanishes."""

import asyncio
from types import TracebackType
from typing import Self


class BreakableLink:
    """Forwards connections to `target` ("host:port"); `address` is where it listens."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.address = ""
        self.num_bytes = 0
        """Bytes towards the daemon so far."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        self._flows.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Resets every connection, both ways; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()

    def kill(self) -> None:
        """Resets every connection, and takes no more."""
        if self._server is not None:
            self._server.close()
        self.cut()

    def silence(self) -> None:
        """From now on nothing passes, and nobody is told: a host that has vanished."""
        self._flows.clear()

    def let_go(self) -> None:
        """Everything passes again, also what was held."""
        self._flows.set()

    async def listen_again(self) -> None:
        """At the same address, after `kill`."""
        host, _, port = self.address.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            daemon_reader, daemon_writer = await asyncio.open_connection(self._host, self._port)
            self._writers.add(daemon_writer)
            await asyncio.gather(self._forward(reader, daemon_writer, 1), self._forward(daemon_reader, writer, 0))
            self._writers.discard(daemon_writer)
        except OSError:
            writer.transport.abort()
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counted: int) -> None:
        try:
            while data := await reader.read(64 << 10):
                await self._flows.wait()
                self.num_bytes += counted * len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()
