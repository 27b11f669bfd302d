"""The processes that are measured: servers of others, and programs of ours that obey lines of JSON.

A peer that cannot be run is an error that names it, never a peer that is missing from the table.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc.aio

PACKAGES = Path(sys.prefix) / "bench"
"""Where scripts/bench puts what is measured against. On nobody's path but of those that need it: vLLM's gRPC server
brings a plugin that every vLLM on the path would load."""


class PeerError(RuntimeError):
    """A peer could not be run."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer} could not be run: {reason}")


class PeerProcess:
    """A process in a group of its own, with what it says on stderr in a log."""

    def __init__(
        self, name: str, command: list[str], log: Path, env: Mapping[str, str], *, obeys: bool = False
    ) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if obeys else subprocess.DEVNULL,
                stdout=subprocess.PIPE if obeys else file,
                stderr=file,
                env={**os.environ, **env},
                text=True,
                # A group and not a session: see tests/support/daemon_process.py.
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def failure(self, reason: str) -> PeerError:
        """An error with the end of its log."""
        return PeerError(self.name, f"{reason}\n{self._log.read_text(errors='replace')[-3000:]}")

    async def wait_until(self, is_ready: Callable[[], Awaitable[bool]], timeout_s: float = 180.0) -> None:
        """Waits until it is ready; raises PeerError when it ends before, or takes too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not await is_ready():
                    if self.process.poll() is not None:
                        raise self.failure(f"it ended with {self.process.returncode}")
                    await asyncio.sleep(0.2)
                return
        raise self.failure(f"it was not ready within {timeout_s:g} s")

    def stop(self, timeout_s: float = 30.0) -> None:
        """Asks it to end, and ends it."""
        if self.process.poll() is None:
            if self.process.stdin is not None:
                self.process.stdin.close()
            else:
                self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Program(PeerProcess):
    """A program of ours that obeys (see `obey`): one order, one answer."""

    def __init__(self, name: str, command: list[str], *, log: Path, env: Mapping[str, str] | None = None) -> None:
        super().__init__(name, command, log, {} if env is None else env, obeys=True)

    @classmethod
    def of_module(
        cls, name: str, module: str, *arguments: str, log: Path, env: Mapping[str, str] | None = None
    ) -> "Program":
        """One in Python."""
        return cls(name, [sys.executable, "-m", module, *arguments], log=log, env=env)

    async def wait_ready(self) -> "Program":
        """Waits until it takes orders."""
        await asyncio.to_thread(self._answer, "READY")
        return self

    async def order(self, **order: Any) -> Any:
        """Gives an order and waits for its answer."""
        return await asyncio.to_thread(self._order, order)

    def _order(self, order: Mapping[str, Any]) -> Any:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("it has ended") from None
        return json.loads(self._answer("ANSWER "))

    def _answer(self, kind: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(kind):
                return line.removeprefix(kind)
        raise self.failure(f"it ended with {self.process.wait()}")


async def obey(carry_out: Callable[..., Awaitable[Any]]) -> None:
    """The program's side: carries out one order after the other until stdin ends."""
    lines = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print("READY", flush=True)
    while line := await lines.readline():
        print("ANSWER " + json.dumps(await carry_out(**json.loads(line))), flush=True)


async def serving_port(server: grpc.aio.Server) -> int:
    """Starts a server on a free port, for as long as the process lives; the port."""
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _servers.append(server)
    return port


_servers: list[grpc.aio.Server] = []  # one that nobody holds is stopped


def with_packages() -> dict[str, str]:
    """Environment of a process that needs what scripts/bench has installed."""
    if not PACKAGES.is_dir():
        raise PeerError("the peers' packages", f"there is no {PACKAGES}: start with scripts/bench")
    return {"PYTHONPATH": os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def use_packages() -> None:
    """The same for this process."""
    with_packages()
    if str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))


def say(line: str) -> None:
    """Progress, on stderr."""
    print(f"bench: {line}", file=sys.stderr, flush=True)
