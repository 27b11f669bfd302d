"""How a daemon starts, drains and dies."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from genserve.client import AsyncClient, Client, UnavailableError
from genserve.errors import DrainingError, EngineDeadError, GenserveError
from genserve.launcher.output import last_words
from tests.support import on_runner_v2
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess


@pytest.fixture
def own_daemon(checkpoints: dict[str, Path], tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon for one test, with front ends."""
    flags = [
        "--model",
        str(checkpoints["a"]),
        *SMALL_ENGINE,
        "--drain-timeout",
        "20",
        "--uds",
        str(tmp_path / "sock"),
        "--frontends",
        "2",
    ]
    process = DaemonProcess(flags, tmp_path / "stderr")
    try:
        yield process.wait_serving()
    finally:
        process.kill()


def descendants(process: DaemonProcess) -> list[psutil.Process]:
    """Everything the daemon has started."""
    return psutil.Process(process.process.pid).children(recursive=True)


async def until_refused(client: AsyncClient) -> None:
    """Asks for tokens until the daemon takes no more requests."""
    async with asyncio.timeout(60):
        try:
            while True:
                await client.generate([1], max_tokens=1)
        except (DrainingError, UnavailableError):
            return


async def test_a_terminated_daemon_finishes_what_runs_and_refuses_what_comes(
    own_daemon: DaemonProcess, tmp_path: Path
) -> None:
    """SIGTERM: running streams end as they would, new ones are UNAVAILABLE, status 0, nothing is left behind."""
    started = descendants(own_daemon)
    async with AsyncClient(own_daemon.address) as client, AsyncClient(f"unix:{tmp_path / 'sock'}") as other:
        assert (await other.generate([1, 2, 3], max_tokens=2, ignore_eos=True)).usage is not None
        await client.wait_ready()
        num_tokens = on_runner_v2.fewer(800)  # within the time of a drain
        options = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True}
        streams = [each.stream([1, 2, 3], **options) for each in (client, other)]  # type: ignore[arg-type]
        first = [await anext(stream) for stream in streams]
        own_daemon.process.send_signal(signal.SIGTERM)
        await asyncio.gather(until_refused(other), until_refused(client))
        for stream, delta in zip(streams, first, strict=True):
            tokens = sum([len(d.outputs[0].token_ids) async for d in stream], len(delta.outputs[0].token_ids))
            assert tokens == num_tokens
    assert await asyncio.to_thread(own_daemon.exit_status, 60) == 0
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []
    assert "Traceback" not in own_daemon.stderr


async def test_killed_engine_ends_every_call_and_the_daemon_exits_with_error(
    own_daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Streams and a pending pause are UNAVAILABLE within two seconds; no process is left. The first stream is one of
    the daemon, the second one of a front end."""
    started = descendants(own_daemon)
    core = next(p for p in started if "EngineCore" in "".join(p.cmdline()) or "EngineCore" in p.name())
    async with AsyncClient(own_daemon.address) as client:
        streams = []
        for _ in range(2):
            streams.append(client.stream([1, 2, 3], max_tokens=1900, ignore_eos=True))
            await anext(streams[-1])
            await client.wait_ready()
        pending = asyncio.create_task(client.pause(mode="wait"))
        await client.status()  # over the same connection: the daemon has got the pause before
        core.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        errors = []
        for stream in streams:
            with pytest.raises((EngineDeadError, UnavailableError)) as caught:
                async for _ in stream:
                    pass
            errors.append(caught.value)
        with pytest.raises((EngineDeadError, UnavailableError)) as caught:
            await pending
        assert time.monotonic() - killed_at < 30
    of_the_daemon = [error for error in (errors[0], caught.value) if isinstance(error, EngineDeadError)]
    assert of_the_daemon and all("was ended by SIGKILL" in str(error) for error in of_the_daemon), of_the_daemon
    # As who has launched it does now. It does not drain any more, and its last words stay those of its end.
    own_daemon.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(own_daemon.exit_status, 60) == 1
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []
    assert re.search(r"genserve: the engine has died: EngineCore\w* was ended by SIGKILL$", own_daemon.stderr, re.M)
    assert last_words(tmp_path / "stderr").startswith(": the engine has died: ")


async def test_a_taken_port_is_named(client: AsyncClient, daemon: DaemonProcess, checkpoints: dict[str, Path]) -> None:
    """Before the engine starts: nobody waits 20 s to learn that the port is taken."""
    port = daemon.address.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "genserve", "serve", "--model", str(checkpoints["a"]), "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert port in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


WRONG_FLAGS = {
    "/nowhere/at/all": ["--model", "/nowhere/at/all"],
    "no-such-flag": ["--max-model-length", "7", "--no-such-flag"],
}


def test_a_wrong_flag_is_explained_in_the_last_line() -> None:
    """No traceback for what the user can mend."""
    command = [sys.executable, "-m", "genserve", "serve", "--port", "0"]
    started = [
        subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for flags in WRONG_FLAGS.values()
    ]
    for says, process in zip(WRONG_FLAGS, started, strict=True):
        _, stderr = process.communicate(timeout=120)
        assert process.returncode in (1, 2)
        assert says in stderr.strip().splitlines()[-1], stderr[-1500:]
        assert "Traceback" not in stderr


def test_the_sync_client_does_the_same(daemon: DaemonProcess, client: AsyncClient) -> None:
    """One example of each kind of call."""
    with Client(daemon.address) as sync:
        assert sync.generate([1, 2], max_tokens=2, ignore_eos=True).usage is not None
        with sync.paused():
            assert sync.status().state.phase.lower() == "paused"
        with pytest.raises(GenserveError):
            sync.generate([1], max_tokens=-1)


async def test_health_is_the_standard_one(daemon: DaemonProcess, client: AsyncClient) -> None:
    """Any health checker can ask for the whole daemon or for one service."""
    async with grpc.aio.insecure_channel(daemon.address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        for service in (b"", b"genserve.v1.GenerationService"):
            request = b"\x0a" + bytes([len(service)]) + service if service else b""
            assert await check(request, timeout=60) == b"\x08\x01"


def test_importing_the_client_loads_neither_torch_nor_vllm() -> None:
    """A rollout worker starts at once."""
    program = (
        "import sys, genserve.client; sys.exit(bool({'torch', 'vllm', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], env=os.environ, timeout=60, check=False).returncode == 0
