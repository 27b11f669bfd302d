"""The drivers of this repository, and one run of a driver."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / "clients"
TIMEOUT_S = 60.0
MAX_OUTPUT_BYTES = 16 << 20
DRIVERS: dict[str, tuple[str, ...]] = {
    "python-stubs": (sys.executable, "-m", "clients.conformance.drivers.python_stubs"),
    "python-client": (sys.executable, "-m", "clients.conformance.drivers.python_client"),
    "typescript": (str(CLIENTS / "typescript/scripts/run"), "conformance/driver.ts"),
}


async def results_of(command: Sequence[str], scenario: dict[str, Any]) -> list[Any]:
    """What a driver prints: one value a line. Raises RuntimeError if it does not start, fails or takes too long."""
    try:
        loop = asyncio.get_running_loop()
        transport, driver = await loop.subprocess_exec(_Driver, *command, cwd=ROOT, process_group=0)
    except OSError as error:
        raise RuntimeError(f"the driver does not start: {error}") from None
    try:
        stdin = transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        stdin.write(json.dumps(scenario).encode())
        stdin.close()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.shield(driver.ended)
    except TimeoutError:
        raise RuntimeError(f"the driver took more than {TIMEOUT_S:g} s") from None
    finally:
        if not driver.ended.done():  # late, or the runner is interrupted
            driver.kill()
            await driver.ended
    if driver.prints_too_much:
        raise RuntimeError(f"the driver printed more than {MAX_OUTPUT_BYTES >> 20} MiB")
    if returncode := transport.get_returncode():
        last = driver.printed[2].decode(errors="replace").strip().splitlines()[-3:]
        raise RuntimeError(f"the driver ended with {returncode}: {' | '.join(last)}")
    try:
        return [json.loads(line) for line in driver.printed[1].splitlines()]
    except (ValueError, RecursionError) as error:
        raise RuntimeError(f"the driver printed what is no JSON: {error}") from None


class _Driver(asyncio.SubprocessProtocol):
    """A process, and what it prints on both streams. `ended`: so has everything that it has started."""

    def __init__(self) -> None:
        self.printed = {1: bytearray(), 2: bytearray()}
        self.prints_too_much = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._group = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        pid = transport.get_pid()
        assert pid is not None
        self._group = pid

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.printed[fd] += data
        if len(self.printed[fd]) > MAX_OUTPUT_BYTES:
            self.prints_too_much = True
            self.kill()

    def process_exited(self) -> None:
        self.kill()  # what it leaves behind would keep its streams open

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)

    def kill(self) -> None:
        """With all that it has started: the command may only be what starts the driver."""
        with suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
