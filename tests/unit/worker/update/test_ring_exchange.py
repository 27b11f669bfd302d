"""Exchanges between a device and the host, on a GPU of which nobody knows when it does what."""

from typing import Any

import pytest
import torch

from genserve.worker.update.pinned_ring import PinnedRing
from genserve.worker.update.ring_exchange import LEAST_SLOTS, RingExchange
from tests.unit.worker.late_gpu import POLICIES, LateEvent, LateGpu, LateGpuDevice, LateRing, LateStream
from tests.unit.worker.update.exchanges import Plain, addresses, exchange_of

SHAPES = [(40,), (3, 50), (7,), (2, 3, 40), (1, 300)]


def tensors(first: int) -> list[torch.Tensor]:
    """Of these shapes, no element as another one."""
    found = []
    for shape in SHAPES:
        size = torch.Size(shape).numel()
        found.append(torch.arange(first, first + size, dtype=torch.float32).view(shape))
        first += size
    return found


def copied(originals: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.clone() for each in originals]


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def ring_exchange_of(
    gpu: LateGpu, live: list[torch.Tensor], new: list[torch.Tensor], num_slots: int = 8
) -> RingExchange:
    """With slots of 100 bytes: the five tensors are 33 pieces."""
    ring = LateRing(gpu, 100, num_slots)
    return RingExchange(zip(live, new, strict=True), ring, LateStream(gpu), LateStream(gpu))


@pytest.mark.parametrize("num_slots", [LEAST_SLOTS, 8, 11])
@pytest.mark.parametrize("policy", POLICIES)
def test_contents_change_places_and_back(policy: Any, num_slots: int) -> None:
    """Whenever streams and threads get to what they are asked; and what is prepared has what was live, for the way
    back."""
    gpu = LateGpu(policy)
    live, new = tensors(0), tensors(5000)
    old_live, old_new = copied(live), copied(new)
    exchange = ring_exchange_of(gpu, live, new, num_slots)
    exchange.commit()
    gpu.synchronize()
    assert not gpu.threads, "a thread still copies"
    assert are_equal(live, old_new)
    assert are_equal(new, old_live)
    exchange.rollback()
    gpu.synchronize()
    assert are_equal(live, old_live)


def num_copies_of_an_exchange() -> int:
    """In streams and threads."""
    gpu = LateGpu("early")
    ring_exchange_of(gpu, tensors(0), tensors(5000)).commit()
    return gpu.num_copies


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_that_fails_is_undone_whichever_it_is(policy: Any) -> None:
    """On the way down, on the way up, into a slot or out of one: the old contents are live after the rollback, to the
    byte, also when the one that fails has written over what it was to write."""
    num_copies = num_copies_of_an_exchange()
    assert num_copies == 4 * 33
    for fails_at in range(num_copies):
        gpu = LateGpu(policy, fails_at)
        live, new = tensors(0), tensors(5000)
        old = copied(live)
        exchange = ring_exchange_of(gpu, live, new)
        with pytest.raises(torch.OutOfMemoryError):
            exchange.commit()
        gpu.synchronize()
        exchange.rollback()
        gpu.synchronize()
        assert are_equal(live, old), fails_at
        assert not gpu.threads, "a thread still copies"


def test_a_rollback_that_fails_can_be_tried_again() -> None:
    """It begins with what is in slots alone, and ends with what is in prepared tensors."""
    num_copies = num_copies_of_an_exchange()
    gpu = LateGpu("early", fails_at=num_copies // 2)
    live, new = tensors(0), tensors(5000)
    old = copied(live)
    exchange = ring_exchange_of(gpu, live, new)
    with pytest.raises(torch.OutOfMemoryError):
        exchange.commit()
    gpu.synchronize()
    gpu.fails_at = gpu.num_copies
    with pytest.raises(torch.OutOfMemoryError):
        exchange.rollback()
    gpu.synchronize()
    exchange.rollback()
    gpu.synchronize()
    assert are_equal(live, old)


def test_both_directions_are_at_work_at_once() -> None:
    """While one piece goes up the next one goes down: neither stream has anything to wait for that is asked of the
    other later."""
    gpu = LateGpu("late")
    live, new = [torch.zeros(8 * 100, dtype=torch.uint8)], [torch.ones(8 * 100, dtype=torch.uint8)]
    order: list[str] = []

    class Named(LateStream):
        name = ""

        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            order.append(self.name)
            super().copy(target, source)

    down, up = Named(gpu), Named(gpu)
    down.name, up.name = "down", "up"
    RingExchange(zip(live, new, strict=True), LateRing(gpu, 100), down, up).commit()
    assert order == ["down", *["down", "up"] * 7, "up"]


def test_a_ring_that_is_too_short_is_refused() -> None:
    """Slots would be used again before they are free."""
    ring = PinnedRing([torch.zeros(8, dtype=torch.uint8)] * 5, [LateEvent() for _ in range(5)])
    with pytest.raises(ValueError, match="needs 6 slots, the ring has 5"):
        RingExchange([], ring, LateStream(LateGpu("late")), LateStream(LateGpu("late")))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exchange_takes_both_ways_and_either_can_fail(policy: Any) -> None:
    """Large tensors are exchanged through the ring, small ones and those with gaps go through the buffer. Whatever
    fails, the old version is live after the rollback, at the same addresses."""
    live, gpu = Plain(1.0), LateGpu(policy)
    before = addresses(live)
    exchanged = exchange_of(live, Plain(2.0), LateGpuDevice(gpu))
    exchanged.commit()
    assert live.seen() == {2.0}
    exchanged.rollback()
    assert live.seen() == {1.0}
    num_copies = gpu.num_copies
    exchange_of(live, Plain(2.0), LateGpuDevice(gpu)).commit()
    for fails_at in range(gpu.num_copies - num_copies):
        live, gpu = Plain(1.0), LateGpu(policy, fails_at)
        before = addresses(live)
        exchanged = exchange_of(live, Plain(2.0), LateGpuDevice(gpu))
        with pytest.raises(torch.OutOfMemoryError):
            exchanged.commit()
        exchanged.rollback()
        assert live.seen() == {1.0}, fails_at
        assert addresses(live) == before
