"""A CUDA device on the CPU, whose streams do what they are asked as late as it is allowed, as early, or at any time.

A copy reads and writes when it is done, not when it is asked for: whoever does not wait where it must gets other
contents.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from genserve.worker.update.device import Device
from genserve.worker.update.pinned_ring import Event, PinnedRing
from genserve.worker.update.ring_exchange import RingExchange

Action = Callable[[], None]
POLICIES = ("late", "early", *range(8))
"""When streams and threads do what they are asked: numbers are seeds of something between the two."""


class Late:
    """What was asked of one stream, or of one thread, and is not done."""

    def __init__(self, gpu: "LateGpu") -> None:
        self._gpu = gpu
        self._todo: deque[tuple[Action, LateEvent | None]] = deque()
        self._num_asked = self._num_done = 0

    def ask(self, action: Action, after: "LateEvent | None" = None) -> int:
        """Asks for something, perhaps after another stream's mark as it is now; its number."""
        point = None if after is None else after.copy()
        self._todo.append((action, point))
        self._num_asked += 1
        self._gpu.pass_time()
        return self._num_asked

    def until(self, number: int) -> None:
        """Does what there is up to a number, and what that has to wait for."""
        while self._num_done < number:
            self.do_one()

    def do_one(self) -> None:
        """Does the next thing, if there is any."""
        if self._todo:
            action, after = self._todo.popleft()
            if after is not None:
                after.synchronize()
            self._num_done += 1
            action()

    def finish(self) -> None:
        """Does everything."""
        self.until(self._num_asked)


class LateEvent:
    """A point of a stream."""

    def __init__(self, stream: Late | None = None, number: int = 0) -> None:
        self._stream, self._number = stream, number

    def copy(self) -> "LateEvent":
        """Of the point that is marked now."""
        return LateEvent(self._stream, self._number)

    def mark(self, stream: Late, number: int) -> None:
        """Another point."""
        self._stream, self._number = stream, number

    def record(self) -> None:
        """Of the stream that is nobody's: it has done everything."""
        self._stream = None

    def synchronize(self) -> None:
        """Waits for it."""
        if self._stream is not None:
            self._stream.until(self._number)


class LateGpu:
    """`fails_at`: the number of the copy, of the device or in the host's memory, that finds no memory: it has written
    something by then. `num_copies` counts them."""

    def __init__(self, policy: Any, fails_at: int = -1) -> None:
        self.streams: list[Late] = []
        self.threads: list[Late] = []
        self.fails_at = fails_at
        self.num_copies = 0
        self._policy = policy
        self._random = random.Random(policy)

    def pass_time(self) -> None:
        """Something was asked for, and now or later it is done."""
        everybody = [*self.streams, *self.threads]
        if self._policy == "early":
            for each in everybody:
                each.finish()
        elif self._policy != "late":
            for _ in range(self._random.randrange(4)):
                self._random.choice(everybody).do_one()

    def synchronize(self) -> None:
        """Streams have done everything; threads are not the device's."""
        for each in self.streams:
            each.finish()

    def is_to_fail(self) -> bool:
        """Whether the copy that begins is the one that fails."""
        number, self.num_copies = self.num_copies, self.num_copies + 1
        return number == self.fails_at


class LateStream(Late):
    """A stream of it, as `ring_exchange.CopyStream`."""

    def __init__(self, gpu: LateGpu) -> None:
        super().__init__(gpu)
        gpu.streams.append(self)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Later."""
        fails = self._gpu.is_to_fail()
        self.ask(lambda: _spoil(target) if fails else _copy(target, source))
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def record(self, event: Event) -> None:
        """The point after what was asked for until now."""
        assert isinstance(event, LateEvent)
        event.mark(self, self.ask(lambda: None))

    def wait(self, event: Event) -> None:
        """What follows is done after it."""
        assert isinstance(event, LateEvent)
        self.ask(lambda: None, after=event)


class LateRing(PinnedRing):
    """A ring whose threads are as late."""

    def __init__(self, gpu: LateGpu, slot_bytes: int, num_slots: int = 8) -> None:
        slots = [torch.zeros(slot_bytes, dtype=torch.uint8) for _ in range(num_slots)]
        super().__init__(slots, [LateEvent() for _ in slots])
        self._gpu = gpu

    def start_copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """By a thread of its own."""
        thread, failure = Late(self._gpu), []
        self._gpu.threads.append(thread)

        def copy() -> None:
            if self._gpu.is_to_fail():
                _spoil(target)
                failure.append(torch.OutOfMemoryError("CUDA out of memory"))
            else:
                _copy(target, source)

        thread.ask(copy)
        return [(thread, failure)]

    def finish_copy(self, copy: Any) -> None:
        """Waits for them."""
        for thread, failure in copy:
            thread.finish()
            self._gpu.threads = [each for each in self._gpu.threads if each is not thread]
            if failure:
                raise failure[0]


class LateGpuDevice(Device):
    """A device of a worker that is such a GPU, but for its small copies."""

    keeps_addresses = True

    def __init__(self, gpu: LateGpu, slot_bytes: int = 64, least_bytes: int = 16) -> None:
        super().__init__(torch.device("cpu"))
        self._gpu, self._slot_bytes, self._least_bytes = gpu, slot_bytes, least_bytes

    def synchronize(self) -> None:
        """Everything is done."""
        self._gpu.synchronize()

    def can_exchange(self, live: torch.Tensor, new: torch.Tensor) -> bool:
        """As on a GPU; the CPU stands for both sides."""
        return live.nbytes >= self._least_bytes and live.is_contiguous()

    def ring_exchange(self, pairs: Any) -> RingExchange:
        """In two streams."""
        return RingExchange(pairs, LateRing(self._gpu, self._slot_bytes), LateStream(self._gpu), LateStream(self._gpu))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """At once."""
        if self._gpu.is_to_fail():
            _spoil(target)
            raise torch.OutOfMemoryError("CUDA out of memory")
        super().copy(target, source)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _spoil(target: torch.Tensor) -> None:
    """What a copy has begun is not known."""
    target.fill_(float("nan"))
