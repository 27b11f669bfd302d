"""What genserve adds to vLLM's worker class; the methods are called by `collective_rpc`, by name."""

import json
import os
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

from genserve.worker.arena_tensors import ArenaTensors
from genserve.worker.contract import Ack, Attach, Digests, Prepare, Step
from genserve.worker.digests import weight_digests
from genserve.worker.exchange import Exchange
from genserve.worker.shadow import PrepareCancelledError, Shadow, cancellable
from genserve.worker.tree import holdings, require_exchangeable

# bf16 attention on the CPU uses AMX tiles, and dies with SIGILL in a process that has not asked the kernel for them.
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()

_BACKGROUND_NICENESS = 10


class WeightExchangeExtension:
    """Mixed into vLLM's Worker: `self` is the worker. One version is prepared at a time."""

    _genserve: "WeightDesk"

    def genserve_attach(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Attach -> Ack."""
        rank = self._weight_checksum_prefix().rstrip(":")  # type: ignore[attr-defined]

        def attach() -> None:
            self._genserve = WeightDesk(self, rank, Attach.from_wire(wire))

        return _acknowledge(rank, "", attach)

    def genserve_prepare(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Prepare -> Ack at once, and another one to the report socket when it is done."""
        desk, request = self._genserve, Prepare.from_wire(wire)
        return _acknowledge(desk.rank, request.nonce, lambda: desk.prepare(request))

    def genserve_commit(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Ack."""
        desk, step = self._genserve, Step.from_wire(wire)
        return _acknowledge(desk.rank, step.nonce, lambda: desk.commit(step.nonce))

    def genserve_rollback(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Ack."""
        desk, step = self._genserve, Step.from_wire(wire)
        return _acknowledge(desk.rank, step.nonce, lambda: desk.rollback(step.nonce))

    def genserve_discard(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Ack."""
        desk, step = self._genserve, Step.from_wire(wire)
        return _acknowledge(desk.rank, step.nonce, lambda: desk.discard(step.nonce))

    def genserve_digests(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Nothing -> Digests."""
        return Digests(self._genserve.rank, weight_digests(self.model_runner.get_model())).to_wire()  # type: ignore[attr-defined]


class WeightDesk:
    """What a worker keeps between calls: the shadow, and the version that is prepared or was replaced."""

    def __init__(self, worker: Any, rank: str, attach: Attach) -> None:
        self.rank = rank
        self._worker = worker
        self._attach = attach
        self._addresses_captured = worker.device.type != "cpu" and not worker.model_config.enforce_eager
        self._shadow = Shadow(worker.vllm_config, _shadow_device(worker))
        self._nonce = ""
        self._exchange: Exchange | None = None
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

    def prepare(self, request: Prepare) -> None:
        """Starts to build a version; a report follows."""
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError(f"push {self._nonce} is still being prepared")
        require_exchangeable(self._worker.model_runner.get_model(), self._worker.device)
        self._nonce, self._exchange = request.nonce, None
        self._cancelled = threading.Event()
        self._thread = threading.Thread(
            target=self._prepare_and_report, args=(request, self._cancelled), name="genserve-prepare", daemon=True
        )
        self._thread.start()

    def commit(self, nonce: str) -> None:
        """Exchanges live and prepared."""
        self._prepared(nonce).commit()

    def rollback(self, nonce: str) -> None:
        """Exchanges back what a commit exchanged."""
        if self._nonce == nonce and self._exchange is not None:
            self._exchange.rollback()

    def discard(self, nonce: str) -> None:
        """Frees the version that is not live. Does not wait for a preparation that is still running: that one stops at
        its next tensor."""
        if self._nonce == nonce:
            self._cancelled.set()
            self._exchange = None

    def _prepared(self, nonce: str) -> Exchange:
        if self._nonce != nonce or self._exchange is None:
            raise RuntimeError(f"push {nonce} is not prepared here")
        return self._exchange

    def _prepare_and_report(self, request: Prepare, cancelled: threading.Event) -> None:
        ack = _acknowledge(self.rank, request.nonce, lambda: self._prepare(request, cancelled))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as report:
            report.sendto(json.dumps(ack).encode(), self._attach.report_socket)

    def _prepare(self, request: Prepare, cancelled: threading.Event) -> None:
        _step_back(self._attach)
        tensors = ArenaTensors(request, pin=self._worker.device.type == "cuda")
        try:
            prepared = self._shadow.load(cancellable(tensors, cancelled))
            live = holdings(self._worker.model_runner.get_model())
            exchange = Exchange(live, prepared, addresses_captured=self._addresses_captured)
            if cancelled.is_set():
                raise PrepareCancelledError
            self._exchange = exchange
        finally:
            self._shadow.strip()
            tensors.close()


def _acknowledge(rank: str, nonce: str, action: Callable[[], None]) -> dict[str, Any]:
    """Runs an action; whatever goes wrong becomes part of the answer, with the place it came from."""
    try:
        action()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
        return Ack(rank, nonce, text).to_wire()
    return Ack(rank, nonce, "").to_wire()


def _step_back(attach: Attach) -> None:
    """Lets the live model's thread go first: this thread may use every CPU of the daemon, at a low priority."""
    os.sched_setaffinity(0, attach.cpus)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)


def _shadow_device(worker: Any) -> torch.device:
    """The live model's device if a second copy fits there beside what vLLM uses, else the host."""
    if worker.device.type == "cpu":
        return torch.device("cpu")
    free_bytes, _ = torch.cuda.mem_get_info(worker.device)
    needed_bytes = sum(p.numel() * p.element_size() for p in worker.model_runner.get_model().parameters())
    return worker.device if free_bytes > 1.1 * needed_bytes + (512 << 20) else torch.device("cpu")
