"""A device whose copies come late: each is made when somebody waits for it, as on a GPU that has much to do."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from genserve.worker.update.pinned_ring import PinnedRing


class LateDevice(TorchDispatchMode):
    """Copies from and to the slots of a ring are put off, in the order of their stream. The host's own are not."""

    def __init__(self, slot_bytes: int, num_slots: int) -> None:
        super().__init__()
        slots = [torch.zeros(slot_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        self.ring = PinnedRing(slots, [LateEvent(self) for _ in slots])
        self.num_waits = 0
        self._slots = {slot.untyped_storage().data_ptr() for slot in slots}
        self._stream: list[Callable[[], Any]] = []
        self._num_done = 0

    @property
    def num_begun(self) -> int:
        """Copies that somebody has asked for."""
        return len(self._stream)

    def wait(self, until: int | None = None) -> None:
        """Makes the copies that were asked for first, all by default."""
        until = self.num_begun if until is None else until
        with torch._C._DisableTorchDispatch():  # nothing is put off any longer
            while self._num_done < until:
                self._stream[self._num_done]()
                self._num_done += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if {target.untyped_storage().data_ptr(), source.untyped_storage().data_ptr()} & self._slots:
                assert args[2:] == (True,) or (kwargs or {}).get("non_blocking"), "the host would wait for this copy"
                self._stream.append(lambda: func(target, source))
                return target
        return func(*args, **(kwargs or {}))


class LateEvent:
    """A point of that stream."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._point = 0

    def record(self) -> None:
        """After what was asked for so far."""
        self._point = self._device.num_begun

    def synchronize(self) -> None:
        """Makes what was asked for before it."""
        self._device.num_waits += 1
        self._device.wait(self._point)
