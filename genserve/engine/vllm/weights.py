"""The live weights of all ranks, and the version they have. Also vLLM's own transfer over them."""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from genserve.engine.types import ArenaRef, DigestedWeights, WeightDigest
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.requests.weight_spans import INITIAL_LABEL
from genserve.engine.vllm.workers import WorkerError, Workers
from genserve.errors import DeadlineError, EngineDeadError, EngineTaintedError, GenserveError, PushRolledBackError
from genserve.memory.host import ProcessIdentity
from genserve.security.files import PLAINTEXT, CallerFiles
from genserve.tensors.manifest import TensorSpec
from genserve.worker.contract.calls import (
    Ack,
    Attach,
    Attached,
    Described,
    Digests,
    Fetch,
    Prepare,
    ReadDigests,
    Sleep,
    Step,
    Transfer,
    Unused,
)
from genserve.worker.contract.vllm_settings import runner_of

log = logging.getLogger(__name__)

_ROLLBACK_TIMEOUT_S = 30.0
# How long each part of a reading keeps the engine from its next step.
_READING_S = 0.01
GRACE_S = 10.0
"""A rank that is late by less than this is waited for; one that hangs for longer is given up."""


class LiveWeights:
    """Prepares, commits and discards versions on every rank, as `Weights` has it. `address`: where other hosts
    reach the daemon, "HOST:PORT"."""

    def __init__(
        self, llm: AsyncLLM, liveness: Liveness, workers: Workers, address: str, peers: CallerFiles = PLAINTEXT
    ) -> None:
        self._llm = llm
        self._liveness = liveness
        self._workers = workers
        self._address = address
        self._caller = asdict(peers)
        self._can_roll_back = True
        self.takes_arriving = False
        """Whether all workers are on this host."""
        self.version = 0

    async def attach(self, timeout_s: float, *, takes_adapters: bool) -> Attached:
        """Makes every worker ready for pushes, before anything is served, and returns how they will take new versions.
        If ranks differ, `weight_update` lists the ways, and the reason is that of the last one. Raises RuntimeError."""
        cpus = sorted(os.sched_getaffinity(0))
        attach = Attach(self._workers.report_socket, cpus, asdict(ProcessIdentity.own()), self._address)
        answers = await self._workers.call("genserve_attach", attach.to_wire(), timeout_s=timeout_s)
        attached = [Attached.from_wire(answer) for answer in answers]
        for each in attached:
            if each.error:
                raise RuntimeError(f"worker {each.rank} cannot take pushes: {each.error}")
        self._workers.other_hosts = _by_host(attached)
        if self._workers.other_hosts and not self._address:
            raise RuntimeError(
                f"worker {next(iter(self._workers.other_hosts.values()))[0]} cannot map the daemon's memory, as it "
                "runs on another host, in another PID namespace or as another user, and it cannot reach the daemon to "
                "fetch pushed weights: listen on an address of this host (--host, --port)"
            )
        if self._workers.other_hosts and takes_adapters:
            # The refusals cover what flags show. Where Ray runs its workers is known only now.
            raise RuntimeError(
                "--enable-lora: some workers run on other hosts, and an adapter is loaded from files that the daemon "
                "writes on its own [adapters-on-other-hosts]"
            )
        runner = runner_of(self._llm.vllm_config)
        for each in attached:
            if each.model_runner != runner:
                raise RuntimeError(
                    f"worker {each.rank} has vLLM's model runner {each.model_runner}, and the daemon expects {runner}: "
                    "set VLLM_USE_V2_MODEL_RUNNER to the same value on all hosts, or nowhere"
                )
        self.takes_arriving = not self._workers.other_hosts
        self._can_roll_back = all(each.can_roll_back for each in attached)
        ways = sorted({each.weight_update for each in attached})
        return Attached(
            rank="",
            error="",
            weight_update=", ".join(ways),
            reason=next(each.reason for each in attached if each.weight_update == ways[-1]),
            can_roll_back=self._can_roll_back,
            reserved_device_bytes=max(each.reserved_device_bytes for each in attached),
            pinned_host_bytes=min(each.pinned_host_bytes for each in attached),
            model_memory=dict(sum((Counter(each.model_memory) for each in attached), Counter())),
            model_runner=runner,
        )

    async def unused_tensors(self, tensors: Sequence[TensorSpec], timeout_s: float) -> frozenset[str]:
        """The names of those tensors that no rank loads; none if a rank does not know."""
        request = Described([(each.name, each.dtype, each.shape) for each in tensors])
        try:
            answers = await self._workers.acks(Unused, "genserve_unused", request.to_wire(), timeout_s=timeout_s)
        except WorkerError as error:
            log.info("pushes must bring all tensors of the checkpoint, as it is not known which are loaded: %s", error)
            return frozenset()
        return frozenset[str].intersection(*(frozenset(each.names) for each in answers))

    def close(self) -> None:
        """Stops listening to workers."""
        self._workers.close()

    async def prepare(self, nonce: str, arena: ArenaRef, tensors: Sequence[TensorSpec], timeout_s: float) -> None:
        """Builds a version beside the live one."""
        deadline_s = time.monotonic() + timeout_s
        places = [(t.name, t.dtype, t.shape, t.offset, t.length) for t in tensors]
        try:
            fetched = await self._fetch(nonce, arena, timeout_s) if self._workers.other_hosts else {}
            request = Prepare(nonce, arena.path, arena.size_bytes, places, fetched, arena.arrival_path)
            left_s = max(0.0, deadline_s - time.monotonic())
            await self._workers.prepare(request, timeout_s=left_s)
        except WorkerError as error:
            raise PushRolledBackError(f"the weights could not be prepared; nothing changed: {error}") from error

    async def _fetch(self, nonce: str, arena: ArenaRef, timeout_s: float) -> dict[str, str]:
        """Has one worker of every other host fetch the bytes; the paths of their arenas by host."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        host_of = {ranks[0]: host for host, ranks in self._workers.other_hosts.items()}
        request = Fetch(nonce, list(host_of), self._address, arena.push_id, arena.size_bytes, timeout_s, self._caller)
        await self._workers.acks(Ack, "genserve_fetch", request.to_wire(), timeout_s=timeout_s)
        paths: dict[str, str] = {}
        try:
            async for each in self._workers.progress("genserve_fetched", nonce, host_of.keys(), deadline_s):
                if each.error:
                    raise WorkerError(f"{each.rank} could not fetch the bytes: {each.error}")
                paths[host_of[each.rank]] = each.arena_path
        except DeadlineError as error:
            raise DeadlineError(f"other hosts could not fetch the bytes within {timeout_s:g} s") from error
        return paths

    async def commit(self, nonce: str, version: int, timeout_s: float) -> None:
        """Exchanges live and prepared weights and labels later tokens, or exchanges them back."""
        step = Step(nonce).to_wire()
        deadline_s = time.monotonic() + timeout_s
        try:
            # A busy machine is late; a worker that hangs is given up.
            await self._workers.acks(Ack, "genserve_commit", step, timeout_s=timeout_s + GRACE_S)
            await self.label(str(version), timeout_s + GRACE_S)
        except DeadlineError as error:
            raise self.given_up(error) from error
        except BaseException as error:
            if self._liveness.dead:
                raise
            await asyncio.shield(self._roll_back(step, error))
            if isinstance(error, GenserveError | WorkerError):
                raise PushRolledBackError(f"the commit failed; version {self.version} is served: {error}") from error
            raise
        # An update in place cannot be undone: it is late, but complete.
        if time.monotonic() > deadline_s and self._can_roll_back:
            late = DeadlineError(f"the commit took longer than {timeout_s:g} s, and was undone")
            await asyncio.shield(self._roll_back(step, late))
            raise late
        self.version = version

    async def _roll_back(self, step: dict[str, Any], cause: BaseException) -> None:
        try:
            await self._workers.acks(Ack, "genserve_rollback", step, timeout_s=_ROLLBACK_TIMEOUT_S)
            await self.label(str(self.version) if self.version else INITIAL_LABEL, _ROLLBACK_TIMEOUT_S)
        except DeadlineError as error:
            raise self.given_up(error) from error
        except (GenserveError, WorkerError) as error:
            raise EngineTaintedError(f"a commit failed ({cause}) and could not be undone ({error})") from error

    async def before_sleep(self, level: int, timeout_s: float) -> None:
        """Makes every rank keep what a sleep of this level would drop and nothing could restore. Raises
        GenserveError."""
        await self._around_sleep("genserve_sleep", Sleep(level).to_wire(), timeout_s)

    async def after_wake_up(self, timeout_s: float) -> None:
        """Makes every rank restore what it kept, once its weights are awake. Raises GenserveError."""
        await self._around_sleep("genserve_wake", {}, timeout_s)

    async def _around_sleep(self, method: str, message: dict[str, Any], timeout_s: float) -> None:
        try:
            await self._workers.acks(Ack, method, message, timeout_s=timeout_s)
        except WorkerError as error:
            raise GenserveError(f"{method.removeprefix('genserve_')} failed: {error}") from error

    async def step(self, method: str, message: dict[str, Any], timeout_s: float) -> None:
        """One call of the contract to every rank. Raises WorkerError unless all ranks succeed."""
        await self._workers.acks(Ack, method, message, timeout_s=timeout_s)

    async def label(self, version: str, timeout_s: float) -> None:
        """Labels later tokens."""
        await self._liveness.call(
            self._llm.update_weight_version(version), what="setting the version", timeout_s=timeout_s
        )

    def given_up(self, error: DeadlineError) -> EngineDeadError:
        """Declares the engine dead: a worker that hangs cannot be asked to undo, and nothing else reaches it."""
        self._liveness.declare_dead(error.message)
        return EngineDeadError(f"{error.message}; the daemon gives up the engine")

    async def discard(self, nonce: str, timeout_s: float) -> None:
        """Frees the version that is not live."""
        await self._workers.acks(Ack, "genserve_discard", Step(nonce).to_wire(), timeout_s=timeout_s)

    async def digests(self, timeout_s: float) -> DigestedWeights:
        """Reads on in the live weights of every rank, which keep what they have read. Workers answer in the order of
        calls: when all have read everything, all have read the same version."""
        wires = await self._workers.call("genserve_digests", ReadDigests(_READING_S).to_wire(), timeout_s=timeout_s)
        answers = [Digests.from_wire(wire) for wire in wires]
        for answer in answers:
            if answer.error:
                raise GenserveError(f"{answer.rank} could not read its weights: {answer.error}")
        spent_s = max(answer.spent_s for answer in answers)
        if not all(answer.done for answer in answers):
            return DigestedWeights(None, spent_s)
        found = [WeightDigest(d.rank, name, sha256) for d in answers for name, sha256 in d.tensors.items()]
        return DigestedWeights(found, spent_s)


def _by_host(attached: Sequence[Attached]) -> dict[str, list[str]]:
    """The ranks that cannot map the daemon's memory, by their host."""
    found: dict[str, list[str]] = {}
    for each in attached:
        if each.other_host:
            found.setdefault(each.other_host, []).append(each.rank)
    return found


class LiveTransfer:
    """vLLM's own transfer over the live weights of all ranks, as `WeightTransfer` specifies.

    It uses genserve's worker extension and not AsyncLLM's methods of these names: a rank that raises there leaves late
    replies for the next call, and errors of other data-parallel engines are lost.
    """

    def __init__(self, weights: LiveWeights) -> None:
        self._weights = weights

    async def init(self, info: str, timeout_s: float) -> None:
        """Connects every rank to the trainer."""
        await self._call("init", timeout_s, info)

    async def start(self, timeout_s: float) -> None:
        """Gets every rank ready to receive."""
        await self._call("start", timeout_s)

    async def update(self, info: str, timeout_s: float) -> None:
        """Has every rank receive tensors."""
        await self._call("update", timeout_s, info)

    async def finish(self, version: int, timeout_s: float) -> None:
        """Makes what was received live, and labels later tokens."""
        await self._call("finish", timeout_s)
        await self._weights.label(str(version), timeout_s)
        self._weights.version = version

    async def abandon(self, timeout_s: float) -> None:
        """Ends an update that was not finished."""
        await self._call("abandon", timeout_s)

    async def _call(self, call: str, timeout_s: float, info: str = "") -> None:
        deadline_s = time.monotonic() + timeout_s
        try:
            await self._weights.step("genserve_transfer", Transfer(call, info).to_wire(), timeout_s + GRACE_S)
        except DeadlineError as error:
            raise self._weights.given_up(error) from error
        except WorkerError as error:
            raise GenserveError(f"vLLM's {call} failed: {error}") from error
        if time.monotonic() > deadline_s:
            raise DeadlineError(f"vLLM's {call} took longer than {timeout_s:g} s")
