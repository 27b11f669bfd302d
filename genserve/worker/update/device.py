"""The device of a worker's model: what background work needs of it, and the memory that is reserved for pushes.

On the CPU there is nothing to select, to wait for or to reserve. On CUDA

- each thread selects the device: otherwise it would work on the first GPU;
- background work has its own stream, because a copy in the stream of the model waits for its steps;
- the memory of a push is reserved in a pool before vLLM sizes its KV cache, which takes all that is left;
- copies from the CPU go through pinned memory.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from vllm.utils.torch_utils import current_stream

from genserve.worker.update.pinned_ring import Event, PinnedRing, ThroughRing, goes_through
from genserve.worker.update.ring_exchange import RingExchange

log = logging.getLogger(__name__)


class Device:
    """The CPU. `keeps_addresses`: whether live tensors stay where they are, so that new contents are copied into them:
    graphs and kernels have captured the addresses, and vLLM's sleep gives their memory back."""

    keeps_addresses = False
    pinned_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @staticmethod
    def of(device: torch.device) -> "Device":
        """The class for `device`."""
        return CudaDevice(device) if device.type == "cuda" else Device(device)

    @contextmanager
    def work(self) -> Iterator[None]:
        """A context for a thread that works on a version that is not live. Its allocations use the memory reserved for
        pushes; its work is complete at the end. May be nested within one thread."""
        yield

    def loading(self) -> AbstractContextManager[object]:
        """A context for the part of `work` in which this thread copies a checkpoint's tensors to the device."""
        return nullcontext()

    def waiting(self) -> AbstractContextManager[object]:
        """A context for the parts of `work` in which this thread waits for bytes that are still arriving."""
        return nullcontext()

    def synchronize(self) -> None:
        """Waits for all work of the device. Raises RuntimeError if some of it failed."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies, at once or in the order of this thread's other copies. `synchronize` completes the copy."""
        target.copy_(source)

    def can_exchange(self, live: torch.Tensor, new: torch.Tensor) -> bool:
        """Whether `ring_exchange` takes these two: a live tensor and one on the CPU."""
        return False

    def ring_exchange(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> RingExchange:
        """Exchanges pairs for which `can_exchange` is true."""
        raise NotImplementedError("exchanging with tensors in host memory")

    def release_memory(self) -> None:
        """Frees the memory reserved for pushes, until something is allocated again."""

    @property
    def reserved_bytes(self) -> int:
        """Memory reserved for pushes, in bytes."""
        return 0

    def free_bytes(self) -> int:
        """Unused memory of the device, in bytes."""
        raise NotImplementedError("the host's memory is asked for elsewhere")


class CudaDevice(Device):
    """A GPU. Made in the thread that loads the model."""

    keeps_addresses = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pool: Any = None
        self._in_pool = ExitStack()  # of the thread that works
        self._working_thread: int | None = None  # its identifier
        # vLLM gives a thread a stream of its own when it first asks for the current one, unless somebody has set one.
        # `work` sets back what there was: the default stream, in which no CUDA graph can be captured.
        current_stream()
        # 0 is the lowest priority that CUDA has, and that of the model's stream: what counts is that it is another one.
        self._stream = torch.cuda.Stream(device, priority=0)
        self._down, self._up = _CopyStream(device), _CopyStream(device)
        self._ring: PinnedRing | None = None
        try:
            self._ring = PinnedRing.allocate()
            self.pinned_bytes = self._ring.size_bytes
        except RuntimeError as error:
            log.warning("no pinned memory, so weights reach the device at a third of the speed: %s", error)

    @contextmanager
    def work(self) -> Iterator[None]:
        """The device, the stream and the pool. torch keeps the memory of a pool for whoever uses that pool,
        whatever empties its caches, and for the stream that allocated it: so both always come together.

        The model's thread cannot empty torch's cache meanwhile, which it does before it runs out of memory.

        Nested work, of an update that reserves memory along with another one, stays in the pool of the outer one:
        torch's allocator refuses a pool within itself."""
        if self._working_thread == threading.get_ident():
            try:
                yield
            finally:
                self._stream.synchronize()
            return
        torch.cuda.set_device(self.device)
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self._stream))
            stack.callback(self._stream.synchronize)
            self._enter_pool()
            stack.callback(self._leave_pool)
            self._working_thread = threading.get_ident()
            try:
                yield
            finally:
                self._working_thread = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Out of the pool: the model's thread may empty torch's cache meanwhile, as a push may arrive for minutes."""
        self._leave_pool()
        try:
            yield
        finally:
            self._enter_pool()

    def _enter_pool(self) -> None:
        """This thread's allocations use the pool from now on."""
        in_pool = ExitStack()
        in_pool.enter_context(torch.cuda.use_mem_pool(self._pool, self.device))
        self._in_pool = in_pool

    def _leave_pool(self) -> None:
        """Does nothing if the pool could not be entered again."""
        in_pool, self._in_pool = self._in_pool, ExitStack()
        in_pool.close()

    def loading(self) -> AbstractContextManager[object]:
        """The pinned ring."""
        return nullcontext() if self._ring is None else ThroughRing(self._ring)

    def release_memory(self) -> None:
        """Frees the pool, which nothing may use."""
        self._pool = None
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Waits for all streams of the device."""
        torch.cuda.synchronize(self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Uses the ring if this is faster."""
        if self._ring is not None and goes_through(target, source):
            self._ring.copy(target, source)
        else:
            target.copy_(source, non_blocking=True)

    def can_exchange(self, live: torch.Tensor, new: torch.Tensor) -> bool:
        """True for large tensors. Copies of a tensor with gaps would take memory of the device."""
        is_from_cpu = live.device == self.device and new.device.type == "cpu"
        return self._ring is not None and is_from_cpu and goes_through(live, new) and live.is_contiguous()

    def ring_exchange(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> RingExchange:
        """Uses two streams of its own, for the two directions."""
        assert self._ring is not None
        return RingExchange(pairs, self._ring, self._down, self._up)

    @property
    def reserved_bytes(self) -> int:
        """The memory of the pool."""
        segments = [] if self._pool is None else self._pool.snapshot(include_traces=False)
        return sum(int(segment["total_size"]) for segment in segments)

    def free_bytes(self) -> int:
        """The driver's figure."""
        return int(torch.cuda.mem_get_info(self.device)[0])


class _CopyStream:
    """`ring_exchange.CopyStream`; copies to and from pinned memory alone are made later."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=0)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record(self, event: Event) -> None:
        with torch.cuda.stream(self._stream):
            event.record()

    def wait(self, event: Event) -> None:
        self._stream.wait_event(event)
