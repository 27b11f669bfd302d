"""A plain socket into a buffer that is there: what Python can receive with nothing on top.

Also the program that receives: it listens, fills one buffer, says so with a byte, and goes on to the next.
"""

import asyncio
import socket
import threading
import time
from pathlib import Path

import numpy as np

from bench.processes import Program, obey

RECEIVE_BYTES = 1 << 20


class RawTcp:
    """One connection over loopback. Made by `start`."""

    def __init__(self, source: "np.ndarray", program: Program, connection: socket.socket) -> None:
        self._source = source
        self._program = program
        self._connection = connection

    @classmethod
    async def start(cls, source: "np.ndarray", directory: Path) -> "RawTcp":
        """Starts the receiver and connects."""
        program = await Program.of_module("raw_tcp", __name__, log=directory / "raw_tcp.log").wait_ready()
        port = await program.order(num_bytes=source.nbytes)
        return cls(source, program, socket.create_connection(("127.0.0.1", port)))

    async def move(self) -> float:
        """Sends all, until the receiver says that it has them."""
        return await asyncio.to_thread(self._move)

    def _move(self) -> float:
        began_at = time.monotonic()
        self._connection.sendall(self._source.data)
        if not self._connection.recv(1):
            raise self._program.failure("it has closed the connection")
        return time.monotonic() - began_at

    async def stop(self) -> None:
        """Ends the receiver."""
        self._connection.close()
        self._program.stop()


def receive(listener: socket.socket, num_bytes: int) -> None:
    """Fills the buffer again and again until the sender goes."""
    buffer = memoryview(bytearray(num_bytes))
    connection, _ = listener.accept()
    while True:
        position = 0
        while position < num_bytes:
            received = connection.recv_into(buffer[position : position + RECEIVE_BYTES])
            if received == 0:
                return
            position += received
        connection.sendall(b"!")


async def listen(num_bytes: int) -> int:
    """Listens; the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=receive, args=(listener, num_bytes), daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


if __name__ == "__main__":
    asyncio.run(obey(listen))
