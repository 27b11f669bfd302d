"""Workers on another host: they fetch pushed weights from the daemon, and end with it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from genserve.client import AsyncClient
from genserve.errors import DeadlineError
from tests.engine.outputs import greedy_outputs, outputs_of
from tests.support import models
from tests.support.daemon_process import BOTH_CORES, SMALL_ENGINE, DaemonProcess
from tests.support.plain_vllm import Reference
from tests.support.two_hosts import ADDRESSES, Host, NoNamespacesError, two_hosts

START_TIMEOUT_S = 420.0  # two starts at once, on two cores
END_TIMEOUT_S = 120.0
pytestmark = [
    pytest.mark.timeout(900),
    # Both start cold. tests/rpc/test_fetch.py fetches without an engine.
    pytest.mark.long(
        *("genserve/worker", "genserve/engine/vllm", "genserve/memory", "genserve/rpc/weights.py"),
        *("tests/support/two_hosts.py", "docs/hosts.md"),
    ),
]


class TwoHosts:
    """A daemon with one of two tensor-parallel ranks, and the other rank on another host."""

    def __init__(self, hosts: tuple[Host, Host], checkpoint: Path, directory: Path) -> None:
        socket = directory / "socket"
        flags = ["--model", str(checkpoint), "--tensor-parallel-size", "2", *SMALL_ENGINE]
        flags += ["--nnodes", "2", "--master-addr", ADDRESSES[0]]
        flags += ["--host", "0.0.0.0", "--port", "50051", "--allow-insecure"]
        self._log = directory / "headless"
        with self._log.open("wb") as log:
            self.headless = subprocess.Popen(
                [*hosts[1].within, sys.executable, "-m", "genserve", "serve", "--headless", "--node-rank", "1", *flags],
                stderr=log,
                stdout=log,
                process_group=0,
            )
        # The socket's file is on both hosts, and here: no address of theirs is.
        self.daemon = DaemonProcess([*flags, "--uds", str(socket)], directory / "daemon", within=hosts[0].within)
        self.target = f"unix:{socket}"

    def wait_serving(self) -> None:
        """Waits until it serves."""
        try:
            self.daemon.wait_serving(START_TIMEOUT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\nthe other host:\n{self.said_elsewhere[-4000:]}") from None

    @property
    def said_elsewhere(self) -> str:
        """What the command on the other host said."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Ends everything."""
        self.daemon.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.headless.pid, signal.SIGKILL)
        self.headless.wait()


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Of all tests here."""
    try:
        with two_hosts() as both:
            yield both
    except NoNamespacesError as error:
        pytest.skip(f"this machine gives us no second host: {error}")


@pytest.fixture(scope="module")
def spread(
    hosts: tuple[Host, Host], checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoHosts]:
    """Of all tests here; the last one ends it."""
    running = TwoHosts(hosts, checkpoints["a"], tmp_path_factory.mktemp("two_hosts"))
    try:
        running.wait_serving()
        yield running
    finally:
        running.stop()


@pytest.fixture
async def client(spread: TwoHosts) -> AsyncIterator[AsyncClient]:
    """A client of it."""
    async with AsyncClient(spread.target) as connected:
        yield connected


async def test_a_worker_on_another_host_serves_what_was_pushed(
    client: AsyncClient,
    spread: TwoHosts,
    checkpoints: dict[str, Path],
    reference: Callable[..., Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs and digests of both ranks are those of a cold start, after a whole push and a partial one."""
    for name, value in BOTH_CORES.items():
        monkeypatch.setenv(name, value)
    references = {name: reference(name, 2) for name in ("a", "b")}
    assert await greedy_outputs(client) == outputs_of(references["a"])
    await client.push_weights(checkpoints["b"], version=1)
    assert await greedy_outputs(client) == outputs_of(references["b"])
    served = await client.get_weights(include_digests=True)
    assert {f"{rank} {name}": value for (rank, name), value in served.digests.items()} == references["b"]["digests"]

    tensors = models.load_tensors(checkpoints["a"])
    names = list(tensors)
    for version, some in ((2, names[::2]), (3, names[1::2])):
        await client.push_weights({name: tensors[name] for name in some}, version=version, partial=True)
    assert await greedy_outputs(client) == outputs_of(references["a"])
    served = await client.get_weights(include_digests=True)
    assert {f"{rank} {name}": value for (rank, name), value in served.digests.items()} == references["a"]["digests"]


def fetched_copies(spread: TwoHosts) -> list[str]:
    """The arenas that processes of the other host have open."""
    found = []
    for process in psutil.Process(spread.headless.pid).children(recursive=True):
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{process.pid}/fd"):
                with suppress(OSError):
                    name = os.readlink(f"/proc/{process.pid}/fd/{fd}")
                    if "genserve-arena" in name:
                        found.append(name)
    return found


async def test_copies_on_the_other_host_are_freed(
    client: AsyncClient, spread: TwoHosts, checkpoints: dict[str, Path]
) -> None:
    """Each push makes one there; none is left, also after a push that ran out of time."""
    version = (await client.get_weights()).weight_version
    seen: set[str] = set()
    async with asyncio.timeout(150.0):
        while not seen:  # a push may be over between two looks
            version += 1
            push = asyncio.create_task(client.push_weights(checkpoints["b"], version=version))
            while not push.done():
                seen.update(await asyncio.to_thread(fetched_copies, spread))
            await push
    with pytest.raises(DeadlineError):
        await client.push_weights(checkpoints["a"], version=version + 1, apply_timeout_s=0.01)
    async with asyncio.timeout(60.0):
        while fetched_copies(spread):
            await asyncio.sleep(0.1)
    assert (await client.get_weights()).weight_version == version


async def test_the_other_host_ends_with_the_daemon(client: AsyncClient, spread: TwoHosts) -> None:
    """A killed one says nothing to anybody: its port tells."""
    await client.get_weights()
    elsewhere = psutil.Process(spread.headless.pid).children(recursive=True)
    assert len(elsewhere) >= 2
    daemon, *_ = psutil.Process(spread.daemon.process.pid).children()
    daemon.send_signal(signal.SIGKILL)
    async with asyncio.timeout(END_TIMEOUT_S):
        while any(map(is_alive, elsewhere)):
            await asyncio.sleep(0.2)
        assert await asyncio.to_thread(spread.headless.wait, END_TIMEOUT_S) == 1


def is_alive(process: psutil.Process) -> bool:
    """Whether it has memory: nobody in those namespaces waits for a process that has ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
