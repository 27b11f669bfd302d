"""What genserve adds to vLLM's worker class; the methods are called by `collective_rpc`, by name."""

import atexit
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.lora.request import LoRARequest

from genserve.memory.host import ProcessIdentity, host_id
from genserve.worker.arena_tensors import ArenaTensors
from genserve.worker.contract import (
    DAEMON_PID_VARIABLE,
    Ack,
    AddLora,
    Attach,
    Attached,
    Digests,
    Fetch,
    Prepare,
    Progress,
    RemoveLora,
    Sleep,
    Step,
    Transfer,
)
from genserve.worker.digests import weight_digests
from genserve.worker.draft import WithDraft
from genserve.worker.lifetime import end_with_address, end_with_process
from genserve.worker.reachable import reachable_bytes
from genserve.worker.shadow import PrepareCancelledError
from genserve.worker.slept import SleptWeights
from genserve.worker.transfer import transfer
from genserve.worker.update import Chosen, choose

if TYPE_CHECKING:
    from genserve.worker.host_copy import HostCopy

# bf16 attention on the CPU uses AMX tiles, and dies with SIGILL in a process that has not asked the kernel for them.
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()

log = logging.getLogger(__name__)

_BACKGROUND_NICENESS = 10
_SWITCH_INTERVAL_S = 0.0005
_PREDECESSOR_TIMEOUT_S = 5.0


class WeightExchangeExtension:
    """Mixed into vLLM's Worker: `self` is the worker. One version is prepared at a time."""

    _genserve: "WeightDesk"

    def genserve_attach(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Attach -> Attached."""
        rank = self._weight_checksum_prefix().rstrip(":")  # type: ignore[attr-defined]

        def attach() -> None:
            self._genserve = WeightDesk(self, rank, Attach.from_wire(wire))

        ack = Ack.from_wire(_acknowledge(rank, "", attach))
        return (Attached(rank, ack.error) if ack.error else self._genserve.attached()).to_wire()

    def genserve_ping(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Nothing -> Ack."""
        return Ack(self._genserve.rank, "", "").to_wire()

    def genserve_fetch(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Fetch -> Ack at once."""
        desk, request = self._genserve, Fetch.from_wire(wire)
        return _acknowledge(desk.rank, request.nonce, lambda: desk.fetch(request))

    def genserve_fetched(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Progress."""
        return self._genserve.fetched(Step.from_wire(wire).nonce).to_wire()

    def genserve_prepare(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Prepare -> Ack at once, and another one to the report socket when it is done."""
        desk, request = self._genserve, Prepare.from_wire(wire)
        return _acknowledge(desk.rank, request.nonce, lambda: desk.prepare(request))

    def genserve_prepared(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Progress."""
        return self._genserve.prepared(Step.from_wire(wire).nonce).to_wire()

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

    def genserve_sleep(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Sleep -> Ack."""
        desk, request = self._genserve, Sleep.from_wire(wire)
        return _acknowledge(desk.rank, request.nonce, lambda: desk.before_sleep(request.level))

    def genserve_wake(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Nothing -> Ack."""
        return _acknowledge(self._genserve.rank, "", self._genserve.after_wake_up)

    def genserve_transfer(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Transfer -> Ack."""
        request = Transfer.from_wire(wire)
        return _acknowledge(self._genserve.rank, request.nonce, lambda: transfer(self, request))

    def genserve_add_lora(self, wire: dict[str, Any]) -> dict[str, Any]:
        """AddLora -> Ack."""
        request = AddLora.from_wire(wire)
        lora = LoRARequest(request.lora_name, request.lora_id, request.directory)
        add = self.add_lora  # type: ignore[attr-defined]
        return _acknowledge(self._genserve.rank, request.nonce, lambda: add(lora))

    def genserve_remove_lora(self, wire: dict[str, Any]) -> dict[str, Any]:
        """RemoveLora -> Ack."""
        request = RemoveLora.from_wire(wire)
        remove = self.remove_lora  # type: ignore[attr-defined]
        return _acknowledge(self._genserve.rank, request.nonce, lambda: remove(request.lora_id))

    def genserve_digests(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Nothing -> Digests."""
        found: dict[str, str] = {}
        desk, model = self._genserve, self.model_runner.get_model()  # type: ignore[attr-defined]

        def digest() -> None:
            found.update(weight_digests(model, desk.constants))
            found.update(desk.draft_digests())

        ack = Ack.from_wire(_acknowledge(desk.rank, "", digest))
        return Digests(ack.rank, found, ack.error).to_wire()


class WeightDesk:
    """What a worker keeps between calls: how it takes new versions, and the one that is prepared or was replaced."""

    def __init__(self, worker: Any, rank: str, attach: Attach) -> None:
        self.rank = rank
        self._attach = attach
        # The user's own worker class does not choose in time: it is done with what vLLM has left.
        self._chosen: Chosen = getattr(worker, "genserve_chosen", None) or choose(worker)
        self._update, self._device = self._chosen.update, self._chosen.device
        # Before anything is served: a weight that no push would reach shall not be found by those who are answered.
        self.constants = self._update.audit().paths
        self._reachable_bytes = reachable_bytes(worker.model_runner.get_model(), self.constants)
        self._slept = SleptWeights(worker)
        # A worker that cannot map the daemon's memory says where it is, and gets the bytes on its own host.
        daemon = ProcessIdentity(**attach.daemon)
        self._other_host = "" if daemon.is_here else host_id()
        # vLLM binds a worker to some of the CPUs that its parent may use.
        self._cpus = sorted(os.sched_getaffinity(os.getppid())) if self._other_host else attach.cpus
        self._host_copy: HostCopy | None = None
        self._nonce = ""
        self._prepared = False
        self._outcome = Progress(rank, "", done=True)  # of the last preparation
        self._tensors: ArenaTensors | None = None
        self._cancelled = threading.Event()
        self._settling = threading.Lock()  # a preparation either ends before a discard, or sees it
        self._threads: list[threading.Thread] = []
        # Every operation of the live model gives Python's lock away: it shall not wait 5 ms for a background thread to
        # give it back.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        if not self._other_host:
            end_with_process(daemon.pid)
        elif attach.daemon_address:
            end_with_address(attach.daemon_address)

    def attached(self) -> Attached:
        """How this worker takes new versions."""
        placement = self._chosen.placement
        return Attached(
            self.rank,
            "",
            placement.way,
            placement.reason,
            self._update.can_roll_back,
            self._device.reserved_bytes,
            self._device.pinned_bytes,
            self._other_host,
            self._reachable_bytes,
        )

    def fetch(self, request: Fetch) -> None:
        """Starts to fetch a version's bytes to this host, if that is this worker's to do."""
        if self.rank not in request.ranks:
            return
        from genserve.worker.host_copy import HostCopy  # gRPC, which workers beside the daemon need not load

        before, copy = self._host_copy, HostCopy(self.rank, request)
        self._host_copy = copy

        def run() -> None:
            if before is not None:
                before.close()
            copy.run()

        threading.Thread(target=run, name="genserve-fetch", daemon=True).start()

    def fetched(self, nonce: str) -> Progress:
        """How far that is."""
        copy = self._host_copy
        return copy.progress if copy is not None and copy.nonce == nonce else Progress(self.rank, nonce, done=True)

    def prepared(self, nonce: str) -> Progress:
        """How far the preparation is."""
        return self._outcome if self._outcome.nonce == nonce else Progress(self.rank, nonce, done=False)

    def prepare(self, request: Prepare) -> None:
        """Starts to prepare a version; a report follows."""
        self._nonce, self._prepared = request.nonce, False
        cancelled = self._cancelled = threading.Event()
        self._start(lambda before: self._prepare_and_report(request, cancelled, before))

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
        """Frees the version that is not live, in the background: requests are running again. A preparation that is
        still under way stops at its next tensor, and frees what it has."""
        if self._host_copy is not None and self._host_copy.nonce == nonce:
            self._drop_host_copy()
        if self._nonce != nonce:
            return
        with self._settling:
            self._cancelled.set()
            was_prepared, self._prepared = self._prepared, False
        if was_prepared:
            self._start(lambda _: self._release())

    def draft_digests(self) -> dict[str, str]:
        """SHA-256 (hex) of the weights that draft, by name, if pushes have them."""
        return self._update.digests() if isinstance(self._update, WithDraft) else {}

    def before_sleep(self, level: int) -> None:
        """Keeps what a sleep would drop, and gives up what pushes have of the device: whoever puts an engine to sleep
        wants that memory too."""
        self._wait_for(self._threads)
        self._drop_host_copy()
        self._slept.before_sleep(level)
        self._prepared = False
        self._release()
        self._update.give_up()

    def after_wake_up(self) -> None:
        """Puts back what was kept, and takes the device's memory again, if it is there: a trainer may still have it."""
        self._slept.after_wake_up()
        try:
            self._update.take_back()
        except torch.OutOfMemoryError as error:
            log.warning("no memory for pushes is kept after the sleep, the next one looks for it: %s", error)

    def _start(self, work: Callable[[list[threading.Thread]], None]) -> None:
        """Does something in the background; it gets the threads that have not ended when it begins."""
        before = [thread for thread in self._threads if thread.is_alive()]

        def run() -> None:
            _step_back(self._cpus)
            work(before)

        thread = threading.Thread(target=run, name="genserve-weights", daemon=True)
        self._threads = [*before, thread]
        thread.start()

    @staticmethod
    def _wait_for(threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(_PREDECESSOR_TIMEOUT_S)
            if thread.is_alive():
                raise RuntimeError("an earlier push is still being prepared or freed here")

    def _drop_host_copy(self) -> None:
        copy, self._host_copy = self._host_copy, None
        if copy is not None:
            self._start(lambda _: copy.close())

    def _release(self) -> None:
        self._update.discard()
        self._tensors = None
        if _malloc_trim is not None:
            _malloc_trim(0)

    def _prepare_and_report(self, request: Prepare, cancelled: threading.Event, before: list[threading.Thread]) -> None:
        ack = _acknowledge(self.rank, request.nonce, lambda: self._prepare(request, cancelled, before))
        self._outcome = Progress(self.rank, request.nonce, True, Ack.from_wire(ack).error)
        if self._other_host:
            return  # the daemon's socket is not here: it asks
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as report:
            report.sendto(json.dumps(ack).encode(), self._attach.report_socket)

    def _prepare(self, request: Prepare, cancelled: threading.Event, before: list[threading.Thread]) -> None:
        self._wait_for(before)
        self._release()
        path = request.fetched_paths[self._other_host] if self._other_host else request.arena_path
        self._tensors = ArenaTensors(request, path)
        try:
            with self._device.work():
                self._update.prepare(self._tensors, cancelled)
            with self._settling:  # all that the device had to do for it is done
                if cancelled.is_set():
                    raise PrepareCancelledError
                self._prepared = True
        except BaseException:
            self._release()
            raise


# glibc keeps what threads have freed, as it seems for good: more than a second model after a few pushes.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def _acknowledge(rank: str, nonce: str, action: Callable[[], None]) -> dict[str, Any]:
    """Runs an action; whatever goes wrong becomes part of the answer, with the place it came from."""
    try:
        action()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
        return Ack(rank, nonce, text).to_wire()
    return Ack(rank, nonce, "").to_wire()


def _step_back(cpus: Sequence[int]) -> None:
    """Lets the live model's thread go first: this thread may use every one of these CPUs, at a low priority."""
    os.sched_setaffinity(0, cpus)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)


# The interpreter collects garbage twice as it ends. With torch in it that takes more than a second, and a shutdown
# waits for one process after the other.
atexit.register(gc.freeze)
# Not only from the attachment on: a daemon may be ended while its engine starts.
if DAEMON_PID_VARIABLE in os.environ and multiprocessing.parent_process() is not None:
    end_with_process(int(os.environ[DAEMON_PID_VARIABLE]))
