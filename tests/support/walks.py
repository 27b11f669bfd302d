"""The ways of a request for tokens, a push and a pause through genserve, as real processes execute them.

`scripts/walks` prints the functions of each, in order. Each way is walked several times, and the shortest one counts:
what runs beside it, such as a heartbeat, is not on it.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import ceil
from pathlib import Path

from genserve.client import AsyncClient
from tests.support import models
from tests.support.daemon_process import SMALL_ENGINE
from tests.support.patience import START_S, until
from tests.support.walked import ENGINE, ROOT

_TRIES = 5
_PROMPT = (5, 6, 7)
_NUM_TOKENS = 60
_LARGE_BYTES, _SMALL_BYTES = 1 << 20, 1 << 10  # of chunks: each tensor of the model in one, and in many


@dataclass(frozen=True, slots=True)
class Walk:
    """A way: the calls on it, each as the file below the checkout and the qualified name."""

    calls: Sequence[tuple[str, str]]

    @property
    def functions(self) -> Sequence[tuple[str, str]]:
        """What a reader meets, in order: without lambdas and comprehensions, which are read where they are written."""
        return list(dict.fromkeys(call for call in self.calls if not call[1].endswith(">")))

    @property
    def files(self) -> Sequence[str]:
        """Where they are, in order."""
        return list(dict.fromkeys(file for file, _ in self.functions))


@dataclass(frozen=True, slots=True)
class Walks:
    """All ways. `generate` ends at vLLM. `per_token`, `per_chunk`: calls for each message with a token, and for each
    chunk that arrives."""

    generate: Walk
    per_token: float
    push: Walk
    per_chunk: float
    pause: Walk
    pause_on_router: Walk


class WalkedProcess:
    """`genserve COMMAND` that notes its calls."""

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        self._log = directory / "walk"
        with (directory / "stderr").open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.walked", str(self._log), *command],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                process_group=0,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert " on " in line, (directory / "stderr").read_text()[-4000:]
        self.address = line.rsplit(" on ", 1)[1].strip()

    async def walk(self, work: Callable[[], Awaitable[object]]) -> Walk:
        """The calls while `work` runs."""
        begun = self._log.with_suffix(".begun")
        for each in (self._log, begun):
            each.unlink(missing_ok=True)
        self._process.send_signal(signal.SIGUSR1)
        await until(begun.exists)
        await work()
        self._process.send_signal(signal.SIGUSR2)
        await until(self._log.exists)
        return Walk([tuple(json.loads(line)) for line in self._log.read_text().splitlines()])

    def kill(self) -> None:
        """Ends it and its engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _ours(walk: Walk) -> Walk:
    """Without vLLM's functions."""
    return Walk([call for call in walk.calls if not call[0].endswith(ENGINE)])


def _until_engine(walk: Walk) -> Walk:
    """As far as the request is vLLM's."""
    leaves = [file.endswith(ENGINE) and name.endswith(".add_request") for file, name in walk.calls]
    return _ours(Walk(walk.calls[: leaves.index(True)]))


@contextmanager
def _running(command: Sequence[str], directory: Path) -> Iterator[WalkedProcess]:
    directory.mkdir()
    process = WalkedProcess(command, directory)
    try:
        yield process
    finally:
        process.kill()


async def _stream(client: AsyncClient, num_tokens: int) -> int:
    """Reads a generation; returns the number of its messages."""
    async with client.stream(_PROMPT, max_tokens=num_tokens, ignore_eos=True) as stream:
        return len([part async for part in stream])


async def _calls_per_message(daemon: WalkedProcess, client: AsyncClient) -> float:
    """Calls for each message with a token, of functions that are called for at least every second one: what runs beside
    it is called less often. On a busy machine several tokens share a message."""
    messages: list[int] = []
    rates: list[dict[tuple[str, str], float]] = []

    async def read() -> None:
        messages.append(await _stream(client, _NUM_TOKENS))

    for _ in range(_TRIES):
        calls = Counter(_ours(await daemon.walk(read)).calls)
        rates.append({call: num_calls / messages[-1] for call, num_calls in calls.items()})
    least = [min(rate.get(call, 0.0) for rate in rates) for call in rates[0]]
    return sum(rate for rate in least if rate >= 0.5)


async def execute(directory: Path) -> Walks:
    """Starts a daemon and a router below `directory`, and walks all ways."""
    a = models.tiny_qwen3(directory / "a", seed=0)
    checkpoints = (a, models.perturbed(a, directory / "b", seed=1))
    versions = count(1)
    sizes = [tensor.nbytes for tensor in models.load_tensors(a).values()]
    flags = ["serve", "--port", "0", "--model", str(a), *SMALL_ENGINE]
    with _running(flags, directory / "daemon") as daemon:
        async with AsyncClient(daemon.address) as client:
            await client.wait_ready()

            async def push(chunk_bytes: int = _LARGE_BYTES) -> None:
                version = next(versions)
                await client.push_weights(checkpoints[version % 2], version=version, chunk_bytes=chunk_bytes)

            await _stream(client, _NUM_TOKENS)  # what is made at the first request and the first push
            await push()
            generate = [_until_engine(await daemon.walk(lambda: _stream(client, 1))) for _ in range(_TRIES)]
            per_token = await _calls_per_message(daemon, client)
            large, small = await _several(daemon, push), await _several(daemon, lambda: push(_SMALL_BYTES))
            pause = await _pause(daemon, client)
        with _running(["route", "--port", "0", "--replica", daemon.address], directory / "router") as router:
            async with AsyncClient(router.address) as client:
                await client.wait_ready()
                pause_on_router = await _pause(router, client)
    num_more = sum(ceil(size / _SMALL_BYTES) - ceil(size / _LARGE_BYTES) for size in sizes)
    return Walks(
        _shortest(generate),
        per_token,
        large,
        (len(small.calls) - len(large.calls)) / num_more,
        pause,
        pause_on_router,
    )


def _shortest(walks: Sequence[Walk]) -> Walk:
    return min(walks, key=lambda walk: len(walk.calls))


async def _several(process: WalkedProcess, work: Callable[[], Awaitable[object]]) -> Walk:
    return _shortest([_ours(await process.walk(work)) for _ in range(_TRIES)])


async def _pause(process: WalkedProcess, client: AsyncClient) -> Walk:
    walks = []
    for _ in range(_TRIES):
        walks.append(_ours(await process.walk(lambda: client.pause(holder="walk", timeout_s=START_S))))
        await client.resume(force=True)
    return _shortest(walks)


def main() -> None:
    """Prints all ways."""
    with tempfile.TemporaryDirectory() as directory:
        walks = asyncio.run(execute(Path(directory)))
    for title, walk in (
        ("Generate, from the socket to AsyncLLM.add_request", walks.generate),
        ("a small push, from the socket to its answer", walks.push),
        ("Pause on a daemon", walks.pause),
        ("Pause on a router, without its daemons", walks.pause_on_router),
    ):
        print(f"{title}: {len(walk.functions)} functions in {len(walk.files)} files, {len(walk.calls)} calls")
        for file, name in walk.functions:
            print(f"    {file}  {name}")
    print(f"a token that comes back: {walks.per_token:.1f} calls")
    print(f"a chunk that arrives: {walks.per_chunk:.1f} calls")


if __name__ == "__main__":
    main()
