"""Calls to every worker of every data-parallel engine, and reports from their threads."""

import asyncio
import json
import socket
import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, TypeVar

from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from genserve.engine.vllm.liveness import Liveness
from genserve.errors import EngineDeadError, GenserveError
from genserve.worker.contract.calls import Ack, Prepare, Progress, Step

AckT = TypeVar("AckT", bound=Ack)

_MAX_REPORT_BYTES = 64 << 10
_FIRST_POLL_S = 0.02
_MAX_POLL_INTERVAL_S = 0.25


class WorkerError(Exception):
    """At least one worker failed. The message says which and why."""


class Workers:
    """All ranks. Owns the socket that background work reports to; ranks on `other_hosts`, which cannot reach it,
    are asked."""

    def __init__(self, engine_core: Any, liveness: Liveness, num_ranks: int) -> None:
        self._core = engine_core
        self._liveness = liveness
        self._num_ranks = num_ranks
        # An abstract name: unlike a file it disappears with the process, however that ends.
        self.report_socket = f"\0genserve-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self.report_socket)
        self.other_hosts: dict[str, list[str]] = {}  # ranks by host
        self._reports: dict[str, tuple[list[Ack], asyncio.Future[list[Ack]]]] = {}
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read_reports)

    def close(self) -> None:
        """Stops listening to reports."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()

    async def call(self, method: str, message: dict[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
        """The answers of all ranks to one method of worker.contract.calls.WeightWorker.

        It calls every data-parallel engine: vLLM's own collective_rpc returns only the first engine's answers, and
        would miss a failure elsewhere. vLLM gets no timeout, because after its own timeout it reads a late reply as the
        answer to the next call. The same happens after an exception of one rank: so workers return errors instead of
        raising them, and a worker that raises nevertheless ends the engine.
        """
        step = method.removeprefix("genserve_")
        per_engine = await self._liveness.call(self._ask(method, message), what=step, timeout_s=timeout_s)
        return [answer for answers in per_engine for answer in answers]

    async def ping(self, workers: bool) -> None:
        """Returns when every EngineCore has answered, and with `workers` every worker, however long this takes. One
        ping at a time, never given up while the engine lives."""
        call = self._ask("genserve_ping", {}) if workers else self._core.call_utility_all_async("get_weight_version")
        try:
            await call
        except Exception as error:
            await self._liveness.raise_if_dead(error, "ping")
            raise

    async def _ask(self, method: str, message: dict[str, Any]) -> list[list[dict[str, Any]]]:
        try:
            answers: list[list[dict[str, Any]]] = await self._core.call_utility_all_async(
                "collective_rpc", method, None, (message,), None
            )
        except VllmEngineDeadError:
            raise  # Liveness knows why
        except Exception as error:
            step = method.removeprefix("genserve_")
            self._liveness.declare_dead(f"a worker failed in {step}: {error}")
            raise EngineDeadError(f"a worker failed in {step}, and the daemon gives up the engine: {error}") from error
        return answers

    async def acks(self, kind: type[AckT], method: str, message: dict[str, Any], *, timeout_s: float) -> list[AckT]:
        """Like `call`, for methods that answer with an Ack or a `kind` that says more. Raises WorkerError unless all
        ranks succeed."""
        acks = [kind.from_wire(each) for each in await self.call(method, message, timeout_s=timeout_s)]
        self._require(acks, message.get("nonce", ""))
        return acks

    async def prepare(self, request: Prepare, *, timeout_s: float) -> None:
        """`genserve_prepare` on every rank: returns when every rank has reported the end of its background work. Raises
        as `acks`."""
        nonce = request.nonce
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        done: asyncio.Future[list[Ack]] = loop.create_future()
        self._reports[nonce] = ([], done)
        elsewhere = {rank for ranks in self.other_hosts.values() for rank in ranks}
        asking: asyncio.Task[None] | None = None
        try:
            await self.acks(Ack, "genserve_prepare", request.to_wire(), timeout_s=timeout_s)
            if elsewhere:
                asking = asyncio.create_task(self._report_progress(nonce, elsewhere, deadline_s))
            left_s = max(0.0, deadline_s - loop.time())
            acks = await self._liveness.wait(done, what="prepare", timeout_s=left_s)
            self._require(acks, nonce)
        finally:
            del self._reports[nonce]
            if asking is not None:
                asking.cancel()

    async def progress(
        self, method: str, nonce: str, ranks: Collection[str], deadline_s: float
    ) -> AsyncIterator[Progress]:
        """The results of `ranks`, each as soon as it is done. The ranks are polled, less and less often, because each
        poll takes the engine's time between two steps. Raises DeadlineError at the loop's time `deadline_s`."""
        loop = asyncio.get_running_loop()
        waiting, interval_s = set(ranks), _FIRST_POLL_S
        while waiting:
            await asyncio.sleep(interval_s)
            interval_s = min(1.5 * interval_s, _MAX_POLL_INTERVAL_S)
            answers = await self.call(method, Step(nonce).to_wire(), timeout_s=max(0.0, deadline_s - loop.time()))
            for each in map(Progress.from_wire, answers):
                if each.rank in waiting and each.done:
                    waiting.discard(each.rank)
                    yield each

    async def _report_progress(self, nonce: str, ranks: Collection[str], deadline_s: float) -> None:
        try:
            async for each in self.progress("genserve_prepared", nonce, ranks, deadline_s):
                self._report(Ack(each.rank, each.nonce, each.error))
        except GenserveError:
            pass  # the engine has died, or the time is over: the caller that waits for reports gets the same error

    def _require(self, acks: Sequence[Ack], nonce: str) -> None:
        failed = [ack for ack in acks if ack.error]
        if failed:
            raise WorkerError("; ".join(f"{ack.rank}: {ack.error}" for ack in failed))
        foreign = [ack for ack in acks if ack.nonce != nonce]
        if foreign:
            raise WorkerError(f"{foreign[0].rank} answered about {foreign[0].nonce!r}, which it was not asked")
        if len({ack.rank for ack in acks}) != self._num_ranks:
            raise WorkerError(f"{len(acks)} answers came of {self._num_ranks} workers")

    def _read_reports(self) -> None:
        while True:
            try:
                datagram = self._socket.recv(_MAX_REPORT_BYTES)
            except BlockingIOError:
                return
            self._report(Ack.from_wire(json.loads(datagram)))

    def _report(self, ack: Ack) -> None:
        if ack.nonce not in self._reports:
            return  # of a push that was given up
        acks, done = self._reports[ack.nonce]
        acks.append(ack)
        # One failure determines the outcome; otherwise all ranks must report.
        if not done.done() and (ack.error or len(acks) == self._num_ranks):
            done.set_result(acks)
