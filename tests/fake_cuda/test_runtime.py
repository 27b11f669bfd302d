"""The fake runtime itself: it is at least as strict as CUDA."""

import os
import subprocess
import sys

import pytest
import torch

from tests.support.fake_cuda import runtime

_NUM_BYTES = 1 << 20


def pinned(value: int) -> torch.Tensor:
    """Bytes of the host that copies may use later."""
    return torch.full((_NUM_BYTES,), value, dtype=torch.uint8, pin_memory=True)


def on_device(value: int) -> torch.Tensor:
    """Bytes of the device, there for all streams."""
    made = torch.full((_NUM_BYTES,), value, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return made


def first(tensor: torch.Tensor) -> int:
    """Its first byte."""
    return int(tensor[0])


def test_a_copy_to_the_host_is_late() -> None:
    """Who reads pinned memory before the copy is complete reads neither the old contents nor the new ones."""
    target = pinned(1)
    target.copy_(on_device(2), non_blocking=True)
    assert first(target) not in (1, 2)
    torch.cuda.synchronize()
    assert first(target) == 2


def test_a_copy_to_pageable_memory_is_complete() -> None:
    """As CUDA promises."""
    assert first(on_device(2).cpu()) == 2


def test_an_event_is_waited_for_alone() -> None:
    """What its stream does later is still to come."""
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    sources = on_device(1), on_device(2)
    one, two = pinned(0), pinned(0)
    with torch.cuda.stream(stream):
        one.copy_(sources[0], non_blocking=True)
        event.record()
        two.copy_(sources[1], non_blocking=True)
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert first(one) == 1
    assert first(two) != 2
    stream.synchronize()
    assert first(two) == 2


def test_poll_sees_an_unfinished_event_once() -> None:
    event = torch.cuda.Event()
    pinned(0).copy_(on_device(1), non_blocking=True)
    event.record()
    assert [event.query(), event.query()] == [False, True]


def test_the_source_of_a_copy_must_not_change_before_it_is_done() -> None:
    with runtime.collected() as complaints:
        source, target = pinned(1), on_device(0)
        target.copy_(source, non_blocking=True)
        source[7] = 2
        torch.cuda.synchronize()
    assert len(complaints) == 1
    assert "changed before the copy" in complaints[0]


def test_the_target_of_a_copy_must_not_change_before_it_is_done() -> None:
    with runtime.collected() as complaints:
        target = pinned(0)
        target.copy_(on_device(1), non_blocking=True)
        target[7] = 2
        torch.cuda.synchronize()
    assert len(complaints) == 1
    assert "was written before" in complaints[0]


@pytest.mark.parametrize("waits", [True, False])
def test_two_streams_at_the_same_memory_have_to_wait(waits: bool) -> None:
    """Also where the order in which they are waited for would hide it."""
    one, other, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    memory, source = on_device(0), on_device(1)
    target = pinned(9)
    with runtime.collected() as complaints:
        with torch.cuda.stream(one):
            memory.copy_(source, non_blocking=True)
            event.record()
        with torch.cuda.stream(other):
            if waits:
                event.wait()
            target.copy_(memory, non_blocking=True)
        torch.cuda.synchronize()
    assert [each for each in complaints if "two streams" not in each] == []
    assert bool(complaints) != waits
    if waits:
        assert first(target) == 1


def test_freed_memory_is_not_copied() -> None:
    memory = torch.empty(_NUM_BYTES * 64, dtype=torch.uint8, device="cuda")
    address = memory.data_ptr()
    del memory
    torch.cuda.empty_cache()
    target = torch.empty(1, dtype=torch.uint8)
    with runtime.collected() as complaints:
        error = runtime.copy(target.data_ptr(), address, 1)
    assert error != 0
    assert "was freed" in complaints[0]


def test_pinned_memory_in_use_is_not_freed() -> None:
    with runtime.collected() as complaints:
        address = runtime.pin(_NUM_BYTES)
        runtime.copy_later(on_device(0).data_ptr(), address, _NUM_BYTES)
        runtime.unpin(address)
        torch.cuda.synchronize()
    assert "is freed while a copy" in complaints[0]


def test_the_memory_of_a_device_is_limited() -> None:
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")


def test_allocations_fail_as_ordered() -> None:
    torch.cuda.empty_cache()
    with runtime.failing_after(1):
        kept = torch.empty(_NUM_BYTES * 64, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(_NUM_BYTES * 64, dtype=torch.uint8, device="cuda")
    torch.empty(_NUM_BYTES * 64, dtype=torch.uint8, device="cuda")
    assert kept.numel()


def test_an_allocation_in_a_pause_is_a_complaint() -> None:
    torch.cuda.empty_cache()
    with runtime.collected() as complaints, runtime.without_allocations():
        torch.empty(_NUM_BYTES * 64, dtype=torch.uint8, device="cuda")
        runtime.unpin(runtime.pin(_NUM_BYTES))
    assert len(complaints) == 2


def test_operators_of_torch_compute() -> None:
    """On memory of the device, with slices and other types, as loaders and post-processing use them."""
    matrix = torch.arange(12.0, device="cuda").view(3, 4)
    turned = torch.zeros(4, 3, device="cuda", dtype=torch.bfloat16)
    turned.copy_(matrix.t())
    assert torch.equal(turned.cpu(), torch.arange(12.0).view(3, 4).t().to(torch.bfloat16))
    part = torch.zeros(3, 8, device="cuda")
    part[:, 2:6] = matrix
    assert torch.equal(part.cpu()[:, 2:6], matrix.cpu())
    assert matrix.sum().item() == 66
    assert torch.cat([matrix, matrix.clone() * 2]).max().item() == 22


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_freed_memory_goes_back_to_the_device(settings: str) -> None:
    """Also with segments that grow, which the driver's virtual memory makes."""
    _runs(
        "import torch\n"
        "before, _ = torch.cuda.mem_get_info()\n"
        "one = torch.arange(1 << 24, device='cuda')\n"
        "assert torch.cuda.mem_get_info()[0] <= before - one.nbytes\n"
        "assert torch.equal(one.cpu(), torch.arange(1 << 24))\n"
        "del one\n"
        "torch.cuda.empty_cache()\n"
        "assert torch.cuda.mem_get_info()[0] == before\n",
        PYTORCH_CUDA_ALLOC_CONF=settings,
    )


def test_code_of_the_host_cannot_read_the_device() -> None:
    """A tensor on the wrong side ends the process, as with a GPU."""
    code = "import ctypes, torch; ctypes.string_at(torch.zeros(1, device='cuda').data_ptr(), 1)"
    assert _run(code).returncode == -11


def test_a_complaint_ends_a_process() -> None:
    done = _run(
        "import torch\n"
        "source = torch.zeros(9, pin_memory=True)\n"
        "torch.empty(9, device='cuda').copy_(source, non_blocking=True)\n"
        "source[0] = 1\n"
        "torch.cuda.synchronize()\n"
    )
    assert done.returncode == -6
    assert "fake CUDA: pinned memory at" in done.stderr


def test_the_driver_may_refuse_to_pin() -> None:
    _runs(
        "import torch\n"
        "try:\n    torch.empty(1 << 20, pin_memory=True)\n"
        "except RuntimeError:\n    torch.zeros(9).cuda()\n"
        "else:\n    raise SystemExit('pinned')\n",
        FAKE_CUDA_PINNED_BYTES="65536",
    )


def test_there_may_be_two_devices() -> None:
    _runs(
        "import torch\n"
        "assert torch.cuda.device_count() == 2\n"
        "one = torch.arange(9, device='cuda:1')\n"
        "assert torch.equal(one.to('cuda:0').cpu(), torch.arange(9))\n",
        FAKE_CUDA_DEVICES="2",
    )


def test_torch_refuses_a_pool_within_itself() -> None:
    """The allocator is torch's own."""
    pool = torch.cuda.MemPool()
    with (
        torch.cuda.use_mem_pool(pool),
        pytest.raises(RuntimeError, match="already recording"),
        torch.cuda.use_mem_pool(pool),
    ):
        pass


def _run(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _runs(code: str, **environment: str) -> None:
    done = _run(code, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
