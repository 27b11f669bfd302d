"""A ring of pinned memory for copies of large tensors between the host and a CUDA device at full speed.

The memory of a push is mapped from another process. Pinning it would take about a second for each 4 GB, at every push
and on every rank, under locks of the driver. And a rank often takes a strided part of a matrix, for which pinning does
not help.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NUM_SLOTS: Final = 8
SLOT_BYTES: Final = 32 << 20
NUM_THREADS: Final = 8
COPY_THREADS: Final = 4
"""Threads of one copy within the host: an exchange copies in both directions at a time."""

LEAST_BYTES: Final = 1 << 20
"""Size from which a tensor goes through the ring."""


class Event(Protocol):
    """The interface of `torch.cuda.Event` that is used here."""

    def record(self) -> None:
        """Marks this point of the current stream."""

    def synchronize(self) -> None:
        """Waits until the marked point is reached."""


class PinnedRing:
    """Belongs to one thread at a time. Copies are complete when the current stream is synchronised."""

    def __init__(self, slots: list[torch.Tensor], events: list[Event]) -> None:
        """`slots`: uint8 tensors of one size in pinned memory, with an event each."""
        self._slots = slots
        self._events = events
        self._used = [False] * len(slots)
        self._next = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, "genserve-copy")
        # Started now, not at the first copy: a thread inherits the priority and the CPUs of the thread that starts it.
        all_there = threading.Barrier(NUM_THREADS)
        list(self._threads.map(lambda _: all_there.wait(), range(NUM_THREADS)))

    @classmethod
    def allocate(cls) -> "PinnedRing":
        """Raises RuntimeError when the driver refuses; torch leaves no error pending then."""
        slots = [torch.empty(SLOT_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_SLOTS)]
        return cls(slots, [torch.cuda.Event() for _ in slots])

    @property
    def size_bytes(self) -> int:
        """Pinned memory, in bytes."""
        return sum(slot.numel() for slot in self._slots)

    @property
    def slot_bytes(self) -> int:
        """Size of a slot, in bytes."""
        return int(self._slots[0].nbytes)

    @property
    def slots(self) -> list[tuple[torch.Tensor, Event]]:
        """All slots, for a caller that uses them in another order. Nothing may be in progress at its beginning and
        end."""
        return list(zip(self._slots, self._events, strict=True))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies between the CPU and the device; both have one shape and type, and any strides."""
        if source.device.type == "cpu":
            self.to_device(target, source)
        else:
            self.from_device(target, source)

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """The caller may change `source` afterwards."""
        for to_part, from_part in parts(target, source, self.slot_bytes):
            slot = self._free_slot()
            staged = shaped_as(self._slots[slot], to_part)
            self._copy_here(staged, from_part)
            to_part.copy_(staged, non_blocking=True)
            self._mark(slot)

    def from_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Complete when it returns, because this thread writes the host's memory."""
        for to_part, from_part in parts(target, source, self.slot_bytes):
            slot = self._free_slot()
            staged = shaped_as(self._slots[slot], from_part)
            staged.copy_(from_part, non_blocking=True)
            self._mark(slot)
            self._events[slot].synchronize()
            self._used[slot] = False
            self._copy_here(to_part, staged)

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> "list[Future[None]]":
        """Copies within the host, in several threads: vLLM gives torch one thread in each worker, which is slower than
        the copy to the device. `finish_copy` waits for it."""
        if target.dim() == 0:
            return [self._threads.submit(_copy, target, source)]
        chunks = zip(target.chunk(COPY_THREADS), source.chunk(COPY_THREADS), strict=True)
        return [self._threads.submit(_copy, *chunk) for chunk in chunks]

    def finish_copy(self, copy: "list[Future[None]]") -> None:
        """Waits until all threads have finished. Raises the error of a thread."""
        wait(copy)
        for part in copy:
            part.result()

    def _copy_here(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.finish_copy(self.start_copy(target, source))

    def _free_slot(self) -> int:
        slot, self._next = self._next, (self._next + 1) % len(self._slots)
        if self._used[slot]:
            self._events[slot].synchronize()
        return slot

    def _mark(self, slot: int) -> None:
        self._events[slot].record()
        self._used[slot] = True


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():  # which belongs to a thread
        target.copy_(source)


def shaped_as(slot: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The beginning of a slot, with the part's shape and type."""
    return slot[: part.nbytes].view(part.dtype).view(part.shape)


def parts(target: torch.Tensor, source: torch.Tensor, most_bytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Corresponding parts of at most this many bytes, cut along the first dimensions."""
    num_bytes = target.nbytes
    if num_bytes == 0:
        return
    if num_bytes <= most_bytes:
        yield target, source
        return
    rows = most_bytes * len(target) // num_bytes
    if rows == 0:
        for to_row, from_row in zip(target, source, strict=True):
            yield from parts(to_row, from_row, most_bytes)
        return
    yield from zip(target.split(rows), source.split(rows), strict=True)


class ThroughRing(TorchDispatchMode):
    """Sends large copies of loaders from the host to the device through the ring, for this thread only."""

    def __init__(self, ring: PinnedRing) -> None:
        super().__init__()
        self._ring = ring

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and goes_through(args[0], args[1]):
            self._ring.copy(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))


def goes_through(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the ring makes a copy faster."""
    return (
        (target.device.type == "cpu") != (source.device.type == "cpu")
        and target.shape == source.shape
        and target.dtype == source.dtype
        and target.nbytes >= LEAST_BYTES
        and not (source if source.device.type == "cpu" else target).is_pinned()
    )
