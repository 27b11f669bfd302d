"""The versions that a worker holds besides the live one."""

import ctypes
import json
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from genserve.memory.arena import ArrivedBytes
from genserve.memory.host import ProcessIdentity, host_id
from genserve.worker.arena_tensors import ArenaTensors
from genserve.worker.background import Background
from genserve.worker.contract.calls import Ack, Attach, Attached, Fetch, Prepare, Progress
from genserve.worker.contract.lifetime import end_with_address, end_with_process
from genserve.worker.contract.vllm_settings import runner_of
from genserve.worker.model.audit import model_memory
from genserve.worker.model.digests import Digesting, DigestReader, digesting
from genserve.worker.model.slept import SleptWeights
from genserve.worker.update.choice import make_update
from genserve.worker.update.protocol import PrepareCancelledError

if TYPE_CHECKING:
    from genserve.worker.fetch import FetchedBytes

log = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005
_PREDECESSOR_TIMEOUT_S = 5.0


class Versions:
    """How a worker takes new versions, and the version that is prepared or was replaced. This is the state between
    calls."""

    def __init__(self, worker: Any, rank: str, attach: Attach) -> None:
        self.rank = rank
        self._worker = worker
        self._attach = attach
        self._other_host = _end_with_daemon(attach)
        self._update, chosen = make_update(worker)
        self._placement, self._device = chosen.placement, chosen.device
        # Before anything is served: clients must not be the ones who find a weight that no push reaches.
        self._constants = self._update.audit().paths
        self._model_memory = model_memory(worker.model_runner.get_model(), self._constants)
        self._slept = SleptWeights(worker)
        self.live_digests = DigestReader(self._digesting)
        # vLLM binds a worker to some of the CPUs that its parent may use.
        self._background = Background(sorted(os.sched_getaffinity(os.getppid())) if self._other_host else attach.cpus)
        self._fetched: FetchedBytes | None = None
        self._nonce = ""
        self._prepared = False
        self._outcome = Progress(rank, "", done=True)  # of the last preparation
        self._tensors: ArenaTensors | None = None
        self._cancelled = threading.Event()
        self._settling = threading.Lock()  # a preparation either ends before a discard, or sees it
        # Every operation of the live model releases Python's global lock: it must not wait 5 ms for a background thread
        # to release it again.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)

    def attached(self) -> Attached:
        """How this worker takes new versions."""
        return Attached(
            rank=self.rank,
            error="",
            weight_update=self._placement.way,
            reason=self._placement.reason,
            can_roll_back=self._update.can_roll_back,
            reserved_device_bytes=self._device.reserved_bytes,
            pinned_host_bytes=self._device.pinned_bytes,
            other_host=self._other_host,
            model_memory=self._model_memory,
            model_runner=runner_of(self._worker),
        )

    def fetch(self, request: Fetch) -> None:
        """Starts to fetch a version's bytes to this host, if that is this worker's to do."""
        if self.rank not in request.ranks:
            return
        from genserve.worker.fetch import FetchedBytes  # gRPC, which workers on the daemon's host need not load

        before, copy = self._fetched, FetchedBytes(self.rank, request)
        self._fetched = copy

        def run() -> None:
            if before is not None:
                before.close()
            self._background.wait(_PREDECESSOR_TIMEOUT_S)  # a host may have room for the bytes of one version only
            copy.run()

        threading.Thread(target=run, name="genserve-fetch", daemon=True).start()

    def fetched(self, nonce: str) -> Progress:
        """How far that is."""
        copy = self._fetched
        return copy.progress if copy is not None and copy.nonce == nonce else Progress(self.rank, nonce, done=True)

    def prepared(self, nonce: str) -> Progress:
        """The progress of preparing."""
        return self._outcome if self._outcome.nonce == nonce else Progress(self.rank, nonce, done=False)

    def prepare(self, request: Prepare) -> None:
        """Starts to prepare a version; a report follows."""
        self._nonce, self._prepared = request.nonce, False
        self._cancelled.set()  # an earlier one that nobody waits for
        cancelled = self._cancelled = threading.Event()
        self._background.do_within(
            _PREDECESSOR_TIMEOUT_S,
            lambda: self._report(request.nonce, lambda: self._prepare(request, cancelled)),
            lambda: self._report(request.nonce, _refuse_turn),
            may_wait=lambda: _arrives(request),
        )

    def commit(self, nonce: str) -> None:
        """Makes the prepared version the live one."""
        if self._nonce != nonce or not self._prepared:
            raise RuntimeError(f"push {nonce} is not prepared here")
        self._update.commit()

    def rollback(self, nonce: str) -> None:
        """Undoes a commit."""
        if self._nonce == nonce and self._prepared:
            self._update.rollback()

    def discard(self, nonce: str) -> None:
        """Frees the version that is not live, in the background, because requests run again. A running preparation
        stops at its next tensor and frees its memory."""
        if self._fetched is not None and self._fetched.nonce == nonce:
            self._drop_fetched()
        if self._nonce != nonce:
            return
        with self._settling:
            self._cancelled.set()
            was_prepared, self._prepared = self._prepared, False
        if was_prepared:
            self._background.do(self._release)

    def _digesting(self) -> Digesting:
        """Reads every live weight that pushes exchange."""
        served = yield from digesting(self._worker.model_runner.get_model(), self._constants)
        return served | (yield from self._update.draft_digests())

    def before_sleep(self, level: int) -> None:
        """Keeps what a sleep would drop, and frees the device memory reserved for pushes: whoever puts an engine to
        sleep needs that memory too."""
        if not self._background.wait(_PREDECESSOR_TIMEOUT_S):
            _refuse_turn()
        self._drop_fetched()
        self._slept.before_sleep(level)
        self._prepared = False
        self._release()
        self._update.release_memory()
        if _malloc_trim is not None:
            _malloc_trim(0)

    def after_wake_up(self) -> None:
        """Restores what was kept, and reserves device memory again, if it is available: a trainer may still use it."""
        self._slept.after_wake_up()
        try:
            self._update.reserve_memory()
        except torch.OutOfMemoryError as error:
            log.warning("no memory for pushes is kept after the sleep, the next one looks for it: %s", error)

    def _drop_fetched(self) -> None:
        copy, self._fetched = self._fetched, None
        if copy is not None:
            self._background.do(copy.close)

    def _release(self) -> None:
        self._update.discard()
        self._tensors = None

    def _report(self, nonce: str, prepare: Callable[[], None]) -> None:
        ack = acknowledged(self.rank, nonce, prepare)
        self._outcome = Progress(self.rank, nonce, True, ack.error)
        if self._other_host:
            return  # the daemon's socket is not on this host: the daemon polls
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as report:
            report.sendto(json.dumps(ack.to_wire()).encode(), self._attach.report_socket)

    def _prepare(self, request: Prepare, cancelled: threading.Event) -> None:
        if cancelled.is_set():  # before its turn came
            raise PrepareCancelledError
        self._release()
        path = request.fetched_paths[self._other_host] if self._other_host else request.arena_path
        self._tensors = ArenaTensors(request, path, cancelled, self._device.waiting)
        try:
            with self._device.work():
                self._update.prepare(self._tensors, cancelled)
            with self._settling:  # all work of the device for it is done
                if cancelled.is_set() or self._nonce != request.nonce:
                    raise PrepareCancelledError
                self._prepared = True
        except BaseException:
            self._release()
            raise


# glibc keeps the memory that a thread has freed for this thread.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def acknowledged(rank: str, nonce: str, action: Callable[[], None]) -> Ack:
    """Runs an action. An error becomes part of the answer, with its location."""
    try:
        action()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
        return Ack(rank, nonce, text)
    return Ack(rank, nonce, "")


def _arrives(request: Prepare) -> bool:
    """Whether bytes of this version are still to come, for which it would have to wait in its turn."""
    if not request.arrival_path:
        return False
    try:
        with ArrivedBytes(request.arrival_path) as arrived:
            return arrived.num_bytes < request.arena_size_bytes
    except OSError:
        return False  # it was given up


def _refuse_turn() -> None:
    raise RuntimeError("an earlier push is still being prepared or freed here")


def _end_with_daemon(attach: Attach) -> str:
    """Makes this process end with the daemon. "" if it can map the daemon's memory, else the host that it runs on:
    it gets the bytes of pushes there. Raises RuntimeError where that cannot be told."""
    daemon = ProcessIdentity(**attach.daemon)
    if daemon.is_here:
        end_with_process(daemon.pid)
        return ""
    host = host_id()
    if not host or not daemon.host_id:
        raise RuntimeError("it cannot be told whether this is the daemon's host: /proc has no boot id")
    if attach.daemon_address:
        end_with_address(attach.daemon_address)
    return host
