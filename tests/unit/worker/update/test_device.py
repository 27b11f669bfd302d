"""What background work asks of CUDA, in which order, and what it does with the answers. No GPU takes part."""

import contextlib
import inspect
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.utils import torch_utils

from genserve.worker.update.device import CudaDevice, Device
from genserve.worker.update.pinned_ring import LEAST_BYTES, PinnedRing
from genserve.worker.update.ring_exchange import LEAST_SLOTS

SECOND = torch.device("cuda:1")


class Runtime:
    """Answers for torch.cuda, and writes down what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, pins: bool) -> None:
        self.log: list[str] = []
        self._in_pool = False
        for name in ("set_device", "synchronize", "empty_cache"):
            monkeypatch.setattr(
                torch.cuda, name, lambda *args, name=name: self.log.append(" ".join([name, *map(str, args)]))
            )
        monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(self.log))
        monkeypatch.setattr(torch.cuda, "MemPool", Pool)
        monkeypatch.setattr("genserve.worker.update.device.current_stream", lambda: self.log.append("vllm's stream"))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self._within("stream"))
        monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: self._within_pool(device))

        def allocate() -> PinnedRing:
            if not pins:
                raise RuntimeError("CUDA error: operation not supported")
            slots = [torch.zeros(64, dtype=torch.uint8) for _ in range(LEAST_SLOTS)]
            return PinnedRing(slots, [Event() for _ in slots])

        monkeypatch.setattr(PinnedRing, "allocate", allocate)

    @contextlib.contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self.log.append(f"enter {name}")
        try:
            yield
        finally:
            self.log.append(f"leave {name}")

    @contextlib.contextmanager
    def _within_pool(self, device: torch.device) -> Iterator[None]:
        """Refuses what torch's allocator refuses."""
        if self._in_pool:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self._in_pool = True
        try:
            with self._within(f"pool {device}"):
                yield
        finally:
            self._in_pool = False


class Stream:
    """Of the device."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def synchronize(self) -> None:
        """Noted."""
        self._log.append("synchronize stream")

    def wait_event(self, event: object) -> None:
        """Noted."""
        self._log.append("wait")


class Pool:
    """Two segments."""

    def snapshot(self, include_traces: bool) -> list[dict[str, Any]]:
        """As torch tells it."""
        assert not include_traces
        return [{"total_size": 100}, {"total_size": 23}]


class Event:
    """Never waited for."""

    def record(self) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""


def test_work_selects_its_device_and_is_complete_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device first: without it a thread of rank 1 works on the first GPU. The stream is waited for last, also after
    an error: what is reported as prepared can be copied."""
    runtime = Runtime(monkeypatch, pins=True)
    device = CudaDevice(SECOND)
    runtime.log.clear()
    with device.work():
        runtime.log.append("work")
    expected = [
        "set_device cuda:1", "enter stream", "enter pool cuda:1", "work",
        "leave pool cuda:1", "synchronize stream", "leave stream",
    ]  # fmt: skip
    assert runtime.log == expected
    runtime.log.clear()
    with pytest.raises(ValueError, match="ordered"), device.work():
        raise ValueError("ordered")
    assert "synchronize stream" in runtime.log


def test_a_wait_for_bytes_is_out_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a thread allocates in a pool, no other thread can empty torch's cache, which the model's thread does before
    it runs out of memory: a push may arrive for minutes. Also if the wait ends with an error, and if works nest."""
    runtime = Runtime(monkeypatch, pins=True)
    device = CudaDevice(SECOND)
    runtime.log.clear()
    with device.work(), device.work(), contextlib.suppress(ValueError), device.waiting():
        runtime.log.append("wait")
        raise ValueError("cancelled")
    pool = [each for each in runtime.log if "pool" in each or each == "wait"]
    enter, leave = "enter pool cuda:1", "leave pool cuda:1"
    assert pool == [enter, leave, "wait", enter, leave]


def test_nested_work_enters_the_pool_once_and_is_complete_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two updates reserve memory together, and torch refuses a pool within itself. An error in the inner work leaves
    the outer one its pool."""
    runtime = Runtime(monkeypatch, pins=True)
    device = CudaDevice(SECOND)
    runtime.log.clear()
    with device.work():
        with contextlib.suppress(ValueError), device.work():
            raise ValueError("ordered")
        runtime.log.append("outer work")
    expected = [
        "set_device cuda:1", "enter stream", "enter pool cuda:1", "synchronize stream", "outer work",
        "leave pool cuda:1", "synchronize stream", "leave stream",
    ]  # fmt: skip
    assert runtime.log == expected
    with device.work():
        pass
    assert runtime.log.count("enter pool cuda:1") == 2, "work that follows enters it again"


def test_two_threads_do_not_share_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested is the work of one thread: another one enters by itself, and torch refuses it."""
    Runtime(monkeypatch, pins=True)
    device = CudaDevice(SECOND)
    refused: list[str] = []

    def other() -> None:
        try:
            with device.work():
                pass
        except RuntimeError as error:
            refused.append(str(error))

    with device.work():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with device.work():
            pass
    assert refused == ["beginAllocateToPool: already recording to mempool_id"]


def test_a_pool_that_cannot_be_entered_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a wait, and when work begins: the push is refused with the device's error. The next one may enter."""
    runtime = Runtime(monkeypatch, pins=True)
    device = CudaDevice(SECOND)
    enter = torch.cuda.use_mem_pool

    def refuse(pool: object, of: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    with pytest.raises(RuntimeError, match="unspecified launch failure"), device.work(), device.waiting():
        monkeypatch.setattr(torch.cuda, "use_mem_pool", refuse)
    with pytest.raises(RuntimeError, match="unspecified launch failure"), device.work():
        pass
    monkeypatch.setattr(torch.cuda, "use_mem_pool", enter)
    runtime.log.clear()
    with device.work():
        pass
    assert runtime.log.count("leave pool cuda:1") == 1


def test_model_thread_has_vllms_stream_before_it_enters_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leaving that one would set the default stream, and vLLM would take it for one that somebody has chosen."""
    runtime = Runtime(monkeypatch, pins=True)
    with CudaDevice(SECOND).work():
        pass
    assert runtime.log[0] == "vllm's stream"
    assert runtime.log.count("vllm's stream") == 1


def test_vllm_still_takes_a_set_stream_for_a_deliberate_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It keeps the last one for each thread, and chooses only where there is none."""
    # Read: vLLM's CPU worker, which another test may have run in this process, puts another function there.
    assert "\ntorch.cuda.set_stream = _patched_set_stream" in inspect.getsource(torch_utils)
    monkeypatch.setattr(torch_utils, "prev_set_stream", lambda stream: None)
    monkeypatch.setattr(torch_utils._current_stream_tls, "value", None, raising=False)
    chosen: Any = object()
    torch_utils._patched_set_stream(chosen)
    assert torch_utils.current_stream() is chosen


def test_what_is_kept_is_counted_and_can_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a sleep; the next work keeps it anew."""
    runtime = Runtime(monkeypatch, pins=True)
    device = CudaDevice(SECOND)
    assert device.reserved_bytes == 0
    with device.work():
        pass
    assert device.reserved_bytes == 123
    device.release_memory()
    assert device.reserved_bytes == 0
    assert runtime.log[-1] == "empty_cache"
    with device.work():
        pass
    assert device.reserved_bytes == 123


def test_a_driver_that_pins_nothing_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights arrive all the same, and nobody says that the memory is pinned."""
    Runtime(monkeypatch, pins=False)
    with caplog.at_level(logging.WARNING):
        device = CudaDevice(SECOND)
    assert device.pinned_bytes == 0
    assert "no pinned memory" in caplog.text
    target = torch.zeros(4)
    device.copy(target, torch.ones(4))
    assert target.tolist() == [1.0] * 4
    monkeypatch.undo()
    Runtime(monkeypatch, pins=True)
    assert CudaDevice(SECOND).pinned_bytes == 64 * LEAST_SLOTS


def test_an_exchange_through_the_ring_has_a_stream_for_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies between the device and pinned memory are asked for in those streams, and not waited for by the copy; the
    way up waits for the way down."""
    runtime = Runtime(monkeypatch, pins=True)
    copies: list[bool] = []
    copy = torch.Tensor.copy_

    def noted(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            runtime.log.append("copy")
        copies.append(non_blocking)
        return copy(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    live, new = torch.zeros(64), torch.ones(64)
    device = CudaDevice(SECOND)
    runtime.log.clear()
    device.ring_exchange([(live, new)]).commit()
    one_way = ["enter stream", "copy", "leave stream", "enter stream", "leave stream"]  # and the event
    assert sorted({*runtime.log}) == ["copy", "enter stream", "leave stream", "wait"]
    assert runtime.log[:5] == one_way
    assert (runtime.log.count("copy"), runtime.log.count("wait")) == (8, 4)
    assert len(copies) > 8, "copies within the host are made at once"
    assert (live.tolist(), new.tolist()) == ([1.0] * 64, [0.0] * 64)


def test_large_tensors_without_gaps_are_exchanged_with_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through pinned memory, if there is any. A copy of a tensor with gaps would take memory of the device."""
    Runtime(monkeypatch, pins=True)
    place = torch.device("meta")
    live = torch.empty(2, LEAST_BYTES, dtype=torch.uint8, device=place)
    new = torch.empty(2, LEAST_BYTES, dtype=torch.uint8)
    device = CudaDevice(place)
    assert device.can_exchange(live, new)
    assert device.can_exchange(live[0], new[0])
    assert not device.can_exchange(new, live)
    assert not device.can_exchange(live, live)
    assert not device.can_exchange(live[0, 1:], new[0, 1:])
    assert not device.can_exchange(live.t(), new.t())
    monkeypatch.undo()
    Runtime(monkeypatch, pins=False)
    assert not CudaDevice(place).can_exchange(live, new)


def test_the_host_needs_nothing() -> None:
    """And lets tensors change places."""
    device = Device.of(torch.device("cpu"))
    assert (device.keeps_addresses, device.reserved_bytes, device.pinned_bytes) == (False, 0, 0)
    with device.work():
        device.synchronize()
