"""A worker extension whose steps fail as ordered: `--worker-extension-cls tests.support.faulty_worker.FaultyExtension`.

An order is a file in the directory named by GENSERVE_FAULTS, written by `order` and read by every worker at every step.
It runs in vLLM's worker processes; nothing of the daemon knows of it.
"""

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FAULTY_EXTENSION = "tests.support.faulty_worker.FaultyExtension"
FAULTS_VARIABLE = "GENSERVE_FAULTS"
KEEP_ADDRESSES_VARIABLE = "GENSERVE_KEEP_ADDRESSES"
"""In the environment: workers exchange weights as on a GPU, contents for contents, and vLLM leaves them unpacked."""
CENSUS_FILE = "tasks"
"""Where the daemon writes, at SIGUSR2, how many asyncio tasks of which coroutine it has."""
_held: list[bytearray] = []
_CYCLES_PER_S = 1.5e9  # of a GPU


@dataclass(frozen=True)
class Fault:
    """What shall happen.

    `step`: attach, prepare, load, commit, rollback, discard, digests, or run, a step of the model. `load` is the
    preparation in its thread, where `after` counts the tensors that were loaded before; in `commit` and `rollback` it
    counts the entries that were put in place, or the copies where addresses are kept; -1 is the end of the step, when
    all is done. `kind`: raise, escape (raises past the answer, into vLLM; at the beginning or the end of a step), hang
    (until `release`), kill (SIGKILL), stop (SIGSTOP), slow (`seconds`, then goes on), compute (the same, with the CPU
    at work), queue (about so many seconds of work in the GPU's stream of this thread, then goes on at once), oom
    (raises what torch does without memory) or leak (256 MiB, until digests are asked for and nothing is ordered).
    `rank` is a part of the name ("tp1", "dp0"), "" = every rank. `skip`: how often, by rank, it lets the step pass
    before; `times`: how often until the order is spent; -1 = always.
    """

    step: str
    kind: str = "raise"
    after: int = 0
    rank: str = ""
    skip: int = 0
    times: int = 1
    seconds: float = 0.5


SLOW_RUN = Fault("run", "slow", seconds=0.05, times=-1)
"""Requests make a step now and then, and do not end before what is to happen to them has happened."""


def order(directory: Path, *faults: Fault) -> None:
    """Orders these faults and no others; spent ones count anew."""
    for spent in directory.glob("*.*.of-order"):
        spent.unlink()
    written = directory / "orders.new"
    # What a worker notes of the faults before counts for their order alone, however late it does so.
    written.write_text(json.dumps({"id": uuid.uuid4().hex, "faults": [asdict(fault) for fault in faults]}))
    written.rename(directory / "orders")


def release(directory: Path) -> None:
    """Nothing fails any more, and what hangs goes on."""
    order(directory)


def fired(directory: Path) -> int:
    """How many faults have happened since the last order, all ranks together: a test without one proves nothing.
    SLOW_RUN is none, but help for others."""
    order_id, faults = _read(directory)
    numbers = [number for number, fault in enumerate(faults) if fault != SLOW_RUN]
    spent = [file for number in numbers for file in directory.glob(f"spent.{order_id}.{number}-*")]
    return sum(file.stat().st_size for file in spent)


def unfired(directory: Path) -> list[Fault]:
    """Ordered faults that have not happened, but for SLOW_RUN."""
    order_id, faults = _read(directory)
    spent = [bool(list(directory.glob(f"spent.{order_id}.{number}-*"))) for number in range(len(faults))]
    return [fault for fault, has_happened in zip(faults, spent, strict=True) if not has_happened and fault != SLOW_RUN]


async def until_fired(directory: Path, count: int = 1, timeout_s: float = 60.0) -> None:
    """Waits until so many faults have happened since the last order."""
    async with asyncio.timeout(timeout_s):
        while fired(directory) < count:
            await asyncio.sleep(0.01)


def num_entries(directory: Path) -> int:
    """How many entries the last commit put in place."""
    return int((directory / "entries").read_text())


def _read(directory: Path) -> tuple[str, list[Fault]]:
    """The last order: what it is called, and its faults."""
    path = directory / "orders"
    told = json.loads(path.read_text()) if path.exists() else {"id": "", "faults": []}
    return told["id"], [Fault(**fields) for fields in told["faults"]]


def _orders() -> list[Fault]:
    return _read(Path(os.environ[FAULTS_VARIABLE]))[1]


def strike(step: str, rank: str, done: int) -> None:
    """Does what is ordered for this step after `done` parts of it."""
    order_id, faults = _read(Path(os.environ[FAULTS_VARIABLE]))
    for number, fault in enumerate(faults):
        if (fault.step, fault.after) != (step, done) or fault.rank not in rank:
            continue
        of = f"{order_id}.{number}-{rank.replace(':', '-')}.of-order"
        if _count(f"passed.{of}") < fault.skip:
            _add(f"passed.{of}")
            continue
        if 0 <= fault.times <= _count(f"spent.{of}"):
            continue
        _add(f"spent.{of}")
        _strike(fault, f"ordered to fail in {step} after {done}")


def _count(name: str) -> int:
    path = Path(os.environ[FAULTS_VARIABLE]) / name
    return path.stat().st_size if path.exists() else 0


def _add(name: str) -> None:
    with (Path(os.environ[FAULTS_VARIABLE]) / name).open("ab") as file:
        file.write(b"x")


def _strike(fault: Fault, message: str) -> None:
    match fault.kind:
        case "raise":
            raise RuntimeError(message)
        case "escape":
            raise LookupError(message)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "slow":
            time.sleep(fault.seconds)
        case "compute":
            until_s = time.monotonic() + fault.seconds
            while time.monotonic() < until_s:
                pass
        case "queue":
            torch.cuda._sleep(int(fault.seconds * _CYCLES_PER_S))
        case "oom":
            raise torch.OutOfMemoryError(message)
        case "leak":
            _held.append(bytearray(b"x") * (256 << 20))
        case "hang":
            while fault in _orders():
                time.sleep(0.02)
        case _:
            raise AssertionError(f"{fault.kind} is no kind of fault")


if FAULTS_VARIABLE in os.environ:  # tests import this module too, where no worker is
    import torch
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core_client import AsyncMPClient

    from genserve.worker import extension
    from genserve.worker.update.device import CudaDevice, Device
    from genserve.worker.update.exchange import PointerExchange
    from genserve.worker.update.shadow import Shadow

    class FaultyExtension(extension.WeightExchangeExtension):
        """The extension, with the calls of the contract that can fail."""

        def genserve_attach(self, wire: dict[str, Any]) -> dict[str, Any]:
            execute = self.execute_model  # type: ignore[has-type]

            def execute_model(*args: Any, **kwargs: Any) -> Any:
                strike("run", self._genserve.rank, 0)
                return execute(*args, **kwargs)

            self.execute_model = execute_model
            if KEEP_ADDRESSES_VARIABLE in os.environ:
                gc.freeze()  # as vLLM's GPU worker does
            return super().genserve_attach(wire)

        def genserve_prepare(self, wire: dict[str, Any]) -> dict[str, Any]:
            _step.begin("load", self._genserve.rank)
            return self._struck("prepare", wire, super().genserve_prepare)

        def genserve_commit(self, wire: dict[str, Any]) -> dict[str, Any]:
            _step.begin("commit", self._genserve.rank)
            return self._struck("commit", wire, super().genserve_commit, entries=True)

        def genserve_rollback(self, wire: dict[str, Any]) -> dict[str, Any]:
            _step.begin("rollback", self._genserve.rank)
            return self._struck("rollback", wire, super().genserve_rollback, entries=True)

        def genserve_digests(self, wire: dict[str, Any]) -> dict[str, Any]:
            if not _orders():
                _held.clear()
            strike("digests", self._genserve.rank, 0)
            return super().genserve_digests(wire)

        def genserve_discard(self, wire: dict[str, Any]) -> dict[str, Any]:
            return self._struck("discard", wire, super().genserve_discard)

        def _struck(self, step: str, wire: dict[str, Any], call: Any, *, entries: bool = False) -> dict[str, Any]:
            try:
                if not entries:  # those count from the first entry that is put in place
                    strike(step, self._genserve.rank, 0)
                answer: dict[str, Any] = call(wire)
                if step == "commit":
                    (Path(os.environ[FAULTS_VARIABLE]) / "entries").write_text(str(_step.done))
                strike(step, self._genserve.rank, -1)
            except RuntimeError as error:
                return {"rank": self._genserve.rank, "nonce": wire.get("nonce", ""), "error": f"RuntimeError: {error}"}
            return answer

    class _Step:
        """Which step a worker is at, and how many parts of it are done."""

        def __init__(self) -> None:
            self.rank, self.name, self.done = "", "", 0

        def begin(self, name: str, rank: str) -> None:
            if name != "load":
                self.name, self.done = name, 0
            self.rank = rank

    _step = _Step()
    _put, _load = PointerExchange._put, Shadow.load

    def _faulty_put(self: PointerExchange, entry: Any, value: Any) -> None:
        strike(_step.name, _step.rank, _step.done)
        _put(self, entry, value)
        _step.done += 1

    class _Counted:
        """Tensors, as often as they are iterated."""

        def __init__(self, tensors: Any) -> None:
            self._tensors = tensors

        def __iter__(self) -> Any:
            for done, item in enumerate(self._tensors):
                strike("load", _step.rank, done)
                yield item
            strike("load", _step.rank, -1)

    def _faulty_load(self: Shadow, tensors: Any, **options: Any) -> Any:
        return _load(self, _Counted(tensors), **options)

    _copy = CudaDevice.copy

    def _faulty_copy(self: CudaDevice, target: Any, source: Any) -> None:
        strike(_step.name, _step.rank, _step.done)
        _copy(self, target, source)
        _step.done += 1

    CudaDevice.copy = _faulty_copy  # type: ignore[method-assign]
    PointerExchange._put = _faulty_put  # type: ignore[method-assign]
    Shadow.load = _faulty_load  # type: ignore[method-assign]

    class _KeptAddresses(Device):
        """The host, which does with weights what a GPU has to."""

        keeps_addresses = True

        def copy(self, target: Any, source: Any) -> None:
            strike(_step.name, _step.rank, _step.done)
            super().copy(target, source)
            _step.done += 1

    def _unpacked(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    if KEEP_ADDRESSES_VARIABLE in os.environ:
        from vllm.model_executor.layers import utils

        Device.of = _KeptAddresses  # type: ignore[method-assign,assignment]
        utils.dispatch_cpu_unquantized_gemm = _unpacked

    def _tell_tasks() -> None:
        # What is measured next shall be what the daemon holds, not what the allocator keeps for later.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        tasks = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
        census = Path(os.environ[FAULTS_VARIABLE]) / f"{CENSUS_FILE}.new"
        census.write_text(json.dumps(tasks))
        census.rename(census.with_name(CENSUS_FILE))

    _clients: list[AsyncMPClient] = []
    _connect = AsyncMPClient.__init__

    def _connect_and_note(self: AsyncMPClient, *args: Any, **kwargs: Any) -> None:
        _connect(self, *args, **kwargs)
        _clients.append(self)

    def _deafen() -> None:
        """Sends what EngineCore cannot decode: its thread that reads calls ends."""
        (client,) = _clients
        client._send_input_message((EngineCoreRequestType.UTILITY.value, b"\xc1"), client.core_engine)

    def _run_and_listen(self: Any) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, _tell_tasks)
        loop.add_signal_handler(signal.SIGUSR1, _deafen)
        gc.collect()
        gc.freeze()  # what was imported stays: each look at the tasks would walk it
        _run(self)

    if (module := sys.modules.get("vllm.v1.engine.async_llm")) is not None:
        # The daemon imports this module too, in the thread that starts the engine, to see whether the class is one of
        # ours. It makes this call on its event loop, when the engine is there.
        _run = module.AsyncLLM._run_output_handler
        module.AsyncLLM._run_output_handler = _run_and_listen
        AsyncMPClient.__init__ = _connect_and_note  # type: ignore[method-assign]
