"""Copies through a ring, in ordinary memory."""

import pytest
import torch

from genserve.worker.update import pinned_ring as ring_module
from genserve.worker.update.pinned_ring import PinnedRing, goes_through
from tests.unit.worker.late_device import LateDevice


class Event:
    """Counts who waits for it."""

    num_waits = 0

    def record(self) -> None:
        """Marks."""

    def synchronize(self) -> None:
        """Waits."""
        self.num_waits += 1


def ring_of(slot_bytes: int, num_slots: int = 2) -> tuple[PinnedRing, list[Event]]:
    """A ring with slots of this size."""
    events = [Event() for _ in range(num_slots)]
    return PinnedRing([torch.zeros(slot_bytes, dtype=torch.uint8) for _ in events], list(events)), events


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(600, dtype=torch.bfloat16).view(10, 60),
        torch.arange(600, dtype=torch.int16).view(60, 10).t(),
        torch.arange(640, dtype=torch.float32).view(4, 160)[:, 3:150],
        torch.arange(7.0),
        torch.tensor(5.0),
        torch.arange(300, dtype=torch.uint8).view(1, 1, 300),
        torch.arange(0.0),
    ],
)
@pytest.mark.parametrize("slot_bytes", [64, 100, 4096])
def test_what_arrives_is_what_was_sent(source: torch.Tensor, slot_bytes: int) -> None:
    """Whatever the shape, the strides and the size, in both directions."""
    ring, _ = ring_of(slot_bytes)
    target = torch.full_like(source, 9)
    ring.to_device(target, source)
    assert torch.equal(target, source)
    back = torch.full_like(source, 9)
    ring.from_device(back, target)
    assert torch.equal(back, source)


def test_a_slot_is_used_again_when_the_device_is_done_with_it() -> None:
    """The first round waits for nobody; from then on every slot is waited for once before it is written."""
    ring, events = ring_of(64, num_slots=2)
    ring.to_device(torch.zeros(128, dtype=torch.uint8), torch.ones(128, dtype=torch.uint8))
    assert [event.num_waits for event in events] == [0, 0]
    ring.to_device(torch.zeros(192, dtype=torch.uint8), torch.ones(192, dtype=torch.uint8))
    assert [event.num_waits for event in events] == [2, 1]


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_a_slot_is_not_written_while_a_late_copy_reads_it(num_slots: int) -> None:
    """The device makes copies when somebody waits for them: what was put into a slot too early would arrive instead."""
    sent = torch.arange(64 * 8 - 5, dtype=torch.int32).to(torch.uint8)
    with LateDevice(64, num_slots) as device:
        arrived = torch.zeros_like(sent)
        device.ring.to_device(arrived, sent)
        sent_before = sent.clone()
        sent.zero_()  # the host may change it
        assert not torch.equal(arrived, sent_before)  # late indeed
        device.wait()
        assert torch.equal(arrived, sent_before)
        assert device.num_waits == 8 - num_slots


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_what_comes_back_late_is_waited_for(num_slots: int) -> None:
    """Out of slots that copies to the device still read: in turns, and complete when it returns."""
    first, second = (torch.randint(0, 255, (64 * 5,), dtype=torch.uint8) for _ in range(2))
    with LateDevice(64, num_slots) as device:
        on_device, back, again = (torch.zeros_like(first) for _ in range(3))
        device.ring.to_device(on_device, first)
        device.ring.from_device(back, on_device)
        assert torch.equal(back, first)
        device.ring.to_device(on_device, second)
        device.ring.from_device(again, on_device)
        assert torch.equal(again, second)


def test_only_large_copies_between_host_and_device_go_through() -> None:
    """Of one type and shape: the rest is converted or broadcast on the way, which torch does."""
    host = torch.zeros(ring_module.LEAST_BYTES, dtype=torch.uint8)
    device = torch.zeros(ring_module.LEAST_BYTES, dtype=torch.uint8, device="meta")
    assert goes_through(device, host)
    assert goes_through(host, device)
    assert not goes_through(host, host)
    assert not goes_through(device, device)
    assert not goes_through(device[1:], host[1:])
    assert not goes_through(device, host.view(torch.int8))
    assert not goes_through(device, host[:1].expand(2, ring_module.LEAST_BYTES // 2)[0])
