"""The fleet in the picture: replicas on the demo model whose workers fail as ordered, and their router; and what
happens to it while Prometheus scrapes it: everything that the dashboard has a panel for."""

import asyncio
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genserve.client import AsyncClient
from genserve.errors import GenserveError, PushNotFoundError
from tests.support import faulty_worker
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.faulty_worker import FAULTS_VARIABLE, FAULTY_EXTENSION, Fault

ROUTER = "router"
_FLAGS = ("--metrics-port", "0", "--worker-extension-cls", FAULTY_EXTENSION)
_METRICS = re.compile(r"^genserve: metrics: http://([^/]+)/metrics$", re.MULTILINE)
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Fleet:
    """`address` of the router; `targets`: where the series of each process are, by its name; `faults`: the directory
    for orders to the workers of the last replica (tests.support.faulty_worker)."""

    address: str
    targets: Mapping[str, str]
    faults: Path


@contextmanager
def running(model: Path, num_replicas: int, directory: Path) -> Iterator[Fleet]:
    """The fleet, for as long as the block runs. Each replica has one core."""
    faults = directory / "faults"
    faults.mkdir()
    nobody = directory / "no-faults"
    nobody.mkdir()
    with ExitStack() as stack:
        daemons: list[DaemonProcess] = []
        for number in range(num_replicas):
            orders = faults if number == num_replicas - 1 else nobody
            core = str(sorted(os.sched_getaffinity(0))[number % len(os.sched_getaffinity(0))])
            daemon = DaemonProcess(
                ["--model", str(model), *SMALL_ENGINE, *_FLAGS],
                directory / f"replica-{number}.log",
                {FAULTS_VARIABLE: str(orders), "VLLM_CPU_OMP_THREADS_BIND": core},
            )
            stack.callback(daemon.kill)
            daemons.append(daemon.wait_serving(300.0))
        targets = {f"replica-{number}": _metrics(daemon.stderr) for number, daemon in enumerate(daemons)}
        log = directory / "router.log"
        address = stack.enter_context(_router([daemon.address for daemon in daemons], log))
        yield Fleet(address, {**targets, ROUTER: _metrics(log.read_text())}, faults)


@contextmanager
def _router(replicas: list[str], log: Path) -> Iterator[str]:
    flags = ["--port", "0", "--metrics-port", "0", *(flag for each in replicas for flag in ("--replica", each))]
    command = [sys.executable, "-m", "genserve", "route", *flags]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, process_group=0)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " on " not in line:
            raise RuntimeError(f"the router has ended: {log.read_text()[-2000:]}")
        yield line.rsplit(" on ", 1)[1].strip()
    finally:
        process.terminate()
        process.wait(_STOP_TIMEOUT_S)


def _metrics(log: str) -> str:
    found = _METRICS.search(log)
    if found is None:
        raise RuntimeError(f"no line says where the series are: {log[-2000:]}")
    return found[1]


_BEGINNINGS = tuple(
    f"You are {who}. " + "Continue the tale, slowly and with many details, as you have always done. " * 20
    for who in ("a storyteller", "a historian", "an explorer", "a ghost", "a sailor", "a king", "a cook", "a thief")
)
"""Requests have one of them in common: longer than a block of the prefix cache, and several, so that no replica has
all."""
_MOST_STREAMS = 16
_EVERY_S = 2.0
"""The calls of somebody who watches, and calls that are refused."""
_LEASE_S = 6.0


class Events:
    """Streams and pushes at a router."""

    def __init__(self, client: AsyncClient, checkpoints: Mapping[str, Path], faults: Path) -> None:
        self._client = client
        self._checkpoints = checkpoints
        self._faults = faults
        self._wanted = 0
        self._rng = random.Random(1)

    async def run(self, seconds: float) -> None:
        """For so long. Raises what no part of it expects."""
        streams = [asyncio.create_task(self._stream(number)) for number in range(_MOST_STREAMS)]
        others = [asyncio.create_task(self._watch()), asyncio.create_task(self._refused())]
        over = [asyncio.create_task(self._load(seconds)), asyncio.create_task(self._trainer(seconds))]
        working = {*streams, *others, *over}
        try:
            done, _ = await asyncio.wait(working, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)

    async def _load(self, seconds: float) -> None:
        """A few streams, many, and a few again."""
        for wanted in (3, 6, _MOST_STREAMS, 10, 5):
            self._wanted = wanted
            await asyncio.sleep(seconds / 5)

    async def _stream(self, number: int) -> None:
        """Requests one after the other, while so many are wanted; one of eight is given up by its client."""
        while True:
            if number >= self._wanted:
                await asyncio.sleep(0.2)
                continue
            tokens = self._rng.choice((32, 64, 128, 400))
            prompt = f"{self._rng.choice(_BEGINNINGS)} Chapter {self._rng.randrange(40)}:"
            asked = self._client.generate(prompt, max_tokens=tokens, temperature=1.0, timeout_s=None)
            patience_s = 3.0 if self._rng.random() < 0.125 else None
            with suppress(TimeoutError):
                await asyncio.wait_for(asked, patience_s)

    async def _watch(self) -> None:
        while True:
            await self._client.status()
            await asyncio.sleep(_EVERY_S)

    async def _refused(self) -> None:
        """Calls that fail, of two kinds."""
        while True:
            with suppress(GenserveError):
                await self._client.get_push("nobody")
            await asyncio.sleep(_EVERY_S * self._rng.uniform(1, 4))
            with suppress(GenserveError):
                await self._client.generate("too long " * 4000, max_tokens=1)
            await asyncio.sleep(_EVERY_S * self._rng.uniform(1, 4))

    async def _trainer(self, seconds: float) -> None:
        """Pushes: two have wrong tensors, one fails in a replica while it is put in place, and one is only staged,
        and dropped. Once a lease pauses the fleet. With time for the pushes themselves at the end."""
        wrong = {"model.embed_tokens.bias": _zeros()}
        steps: list[tuple[str, Any]] = [
            ("push", "b"), ("refused", wrong), ("push", "a"), ("push", "b"), ("lease", None), ("refused", wrong),
            ("failing", "a"), ("push", "a"), ("staged", "b"), ("push", "b"),
        ]  # fmt: skip
        for version, (step, what) in enumerate(steps, 1):
            await asyncio.sleep(seconds / (len(steps) + 5))
            try:
                match step:
                    case "push":
                        await self._push(self._checkpoints[what], version)
                    case "refused":
                        await self._push(what, version)
                    case "failing":
                        faulty_worker.order(self._faults, Fault("commit"))
                        await self._push(self._checkpoints[what], version)
                    case "staged":
                        await self._push(self._checkpoints[what], version, action="stage")
                        await asyncio.sleep(_LEASE_S)
                        await self._client.discard_push(f"push-{version}")
                    case _:
                        async with self._client.paused():
                            await asyncio.sleep(_LEASE_S)
            except GenserveError as error:
                print(f"{step}: {type(error).__name__}: {error}"[:200], file=sys.stderr)
                faulty_worker.release(self._faults)
                with suppress(PushNotFoundError):
                    await self._client.discard_push(f"push-{version}")

    async def _push(self, weights: Any, version: int, **options: Any) -> None:
        """Through gRPC alone, as from another host."""
        options = {"push_id": f"push-{version}", "timeout_s": 120.0, "shared_memory": False, **options}
        await self._client.push_weights(weights, version=version, **options)


def _zeros() -> Any:
    import numpy

    return numpy.zeros((4, 4), numpy.float32)
