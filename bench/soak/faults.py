"""Who uses the daemon as it is not meant: one fault after the other."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

from bench.soak.report import Report
from bench.soak.traffic import Pushes
from genserve.client import AsyncClient
from genserve.errors import GenserveError
from genserve.v1 import generation_pb2, types_pb2
from tests.support.fault_proxy import FaultProxy, Way
from tests.support.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, call_headers, connected, frame_bytes
from tests.support.subject import Subject

_GENERATE = "/genserve.v1.GenerationService/Generate"
_SLOW_READERS = 8
_SLOW_S = 10.0


class Faults:
    """In random order, one every `every_s`."""

    def __init__(
        self, subject: Subject, link: FaultProxy, pushes: Pushes, report: Report, rng: random.Random, every_s: float
    ) -> None:
        self._subject = subject
        self._link = link
        self._pushes = pushes
        self._report = report
        self._rng = rng
        self._every_s = every_s

    async def run(self) -> None:
        """Until it is cancelled. Each kind happens before one of them happens twice."""
        kinds: list[Callable[[], Awaitable[None]]] = [
            self._kill_trainer,
            self._lose_paused_trainer,
            self._pause,
            self._read_nothing,
            self._disconnect,
            self._reset,
            self._black_hole,
            self._slow_link,
        ]
        while True:
            for fault in self._rng.sample(kinds, len(kinds)):
                await asyncio.sleep(self._every_s)
                self._report.outcomes[f"fault, {fault.__name__.strip('_').replace('_', ' ')}"] += 1
                await fault()

    async def _kill_trainer(self) -> None:
        version, name = self._pushes.next()
        program = ["-m", "genserve", "push", str(self._subject.checkpoints[name]), "--version", str(version)]
        quiet = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            sys.executable, *program, "--target", self._subject.process.address, stdout=quiet, stderr=quiet
        )
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._rng.uniform(0.5, 4.0)):
                    await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            await process.wait()

    async def _lose_paused_trainer(self) -> None:
        """It resumes nothing; the lease ends."""
        async with AsyncClient(self._subject.process.address) as trainer:
            await trainer.pause(ttl_s=1.0, holder="lost", timeout_s=60)

    async def _pause(self) -> None:
        with suppress(GenserveError):
            async with self._subject.client.paused(ttl_s=10.0, holder="soak"):
                await asyncio.sleep(0.5)

    async def _read_nothing(self) -> None:
        """Clients without any flow control of their own, which are cut at the write deadline."""
        request = generation_pb2.GenerateRequest(
            token_ids=types_pb2.TokenIds(ids=[1, 2]),
            stop=generation_pb2.Stop(max_tokens=1500, ignore_eos=True),
            output=generation_pb2.Output(logprobs=20),
        ).SerializeToString()
        call = frame_bytes(HEADERS, END_HEADERS, call_headers(_GENERATE), 1)
        call += frame_bytes(DATA, END_STREAM, b"\0" + len(request).to_bytes(4, "big") + request, 1)
        async with AsyncExitStack() as stack:
            for _ in range(_SLOW_READERS):
                _, writer = await stack.enter_async_context(connected(self._subject.process.address, 2 * _SLOW_S))
                writer.write(call)
            await asyncio.sleep(_SLOW_S)

    async def _disconnect(self) -> None:
        """Fifty clients that go in the middle of their streams."""
        async with AsyncExitStack() as stack:
            clients = [AsyncClient(self._subject.process.address) for _ in range(10)]
            for client in clients:
                await stack.enter_async_context(client)
            calls = [
                asyncio.create_task(client.generate([number + 1], max_tokens=1500, ignore_eos=True, timeout_s=60))
                for client in clients
                for number in range(5)
            ]
            await asyncio.wait(calls, timeout=1.0)
        await asyncio.gather(*calls, return_exceptions=True)

    async def _reset(self) -> None:
        self._link.reset()

    async def _black_hole(self) -> None:
        try:
            self._link.black_hole(*self._rng.choice(((Way.TO_SERVER,), (Way.TO_CLIENT,), ())))
            await asyncio.sleep(3.0)
        finally:
            self._link.heal()

    async def _slow_link(self) -> None:
        try:
            self._link.switch(delay_s=0.1, bytes_per_s=200_000)
            await asyncio.sleep(5.0)
        finally:
            self._link.heal()
