"""Bugs that a GPU would punish now and then, and the fake runtime finds each time: each is put into genserve here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from genserve.worker.update import pinned_ring
from genserve.worker.update.device import CudaDevice, _CopyStream
from genserve.worker.update.exchange import ContentExchange, Pair
from genserve.worker.update.pinned_ring import PinnedRing
from genserve.worker.update.ring_exchange import RingExchange, _Piece
from genserve.worker.update.shadow import Shadow
from tests.support.fake_cuda import runtime
from tests.support.fake_cuda.workers import LARGE, Loaded

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The large model."""
    return Loaded.of(LARGE, tmp_path_factory.mktemp("large"))


@pytest.fixture(autouse=True)
def sound(loaded: Loaded) -> Iterator[None]:
    """Without a bug there is no complaint, and each test begins with a."""
    assert loaded.update("beside").push("a") == []
    with runtime.collected():
        yield
        torch.cuda.synchronize()


def findings(loaded: Loaded, way: str) -> list[str]:
    """What is found of two pushes: complaints, and tensors that are wrong."""
    found: list[str] = []
    with runtime.collected() as complaints:
        updated = loaded.update(way)
        for name in "ba":
            found += [f"{each} is wrong" for each in updated.push(name)]
        torch.cuda.synchronize()
    return complaints + found


def _nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize("way", ["beside", "host", "inplace"])
def test_without_a_bug_nothing_is_found(loaded: Loaded, way: str) -> None:
    """The control."""
    assert findings(loaded, way) == []


def test_an_exchange_that_does_not_wait_for_the_device(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that copy to and from the host would still do so when the pause has ended."""
    monkeypatch.setattr(CudaDevice, "synchronize", _nothing)
    found = findings(loaded, "host")
    assert any("two streams use" in each for each in found)


def test_a_preparation_that_nothing_waits_for(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its own end nor the beginning of the exchange."""
    work = CudaDevice.work

    @contextmanager
    def unfinished(self: CudaDevice) -> Iterator[None]:
        stream, self._stream = self._stream, _Hasty(self._stream)  # type: ignore[assignment]
        try:
            with work(self):
                yield
        finally:
            self._stream = stream

    monkeypatch.setattr(CudaDevice, "work", unfinished)
    monkeypatch.setattr(CudaDevice, "synchronize", _nothing)
    found = findings(loaded, "beside")
    assert any("two streams use" in each for each in found)


class _Hasty(torch.cuda.Stream):
    """A stream that says that it has finished."""

    def __new__(cls, stream: torch.cuda.Stream) -> Any:
        return super().__new__(
            cls, stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def synchronize(self) -> None:
        """Does not wait."""


def test_a_slot_that_is_filled_again_too_early(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy to the device has not left it yet. With two slots, as a tiny model has small tensors among its large
    ones, and torch waits for each of those."""

    def free_slot(self: PinnedRing) -> int:
        slot, self._next = self._next, (self._next + 1) % len(self._slots)
        return slot

    monkeypatch.setattr(pinned_ring, "NUM_SLOTS", 2)
    assert findings(loaded, "beside") == []
    monkeypatch.setattr(PinnedRing, "_free_slot", free_slot)
    found = findings(loaded, "beside")
    assert any("changed before the copy" in each for each in found)


def test_a_slot_that_is_read_too_early(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way back of `host` keeps what was live: a later exchange back would serve what the slot had."""
    keep = RingExchange._keep

    def hasty(self: RingExchange, piece: _Piece) -> None:
        slot, event = piece.down
        piece.down = slot, _Passed(event)
        keep(self, piece)
        piece.down = slot, event

    monkeypatch.setattr(RingExchange, "_keep", hasty)
    updated = loaded.update("host")
    updated.prepare("b")
    with runtime.collected() as complaints:
        updated.update.commit()
        updated.update.rollback()
        torch.cuda.synchronize()
    assert complaints or loaded.differing("a")
    updated.update.discard()


class _Passed:
    """An event that says that it has passed."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def record(self) -> None:
        """As the event."""
        self._event.record()

    def synchronize(self) -> None:
        """Does not wait."""


def test_a_stream_that_overwrites_what_another_one_reads(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The live contents must be on the host before the prepared ones replace them."""
    monkeypatch.setattr(_CopyStream, "wait", _nothing)
    found = findings(loaded, "host")
    assert any("two streams use" in each for each in found)


def test_a_tensor_on_the_wrong_side(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every push was refused once: post-processing within the device makes there what is live on the host."""
    as_vllm_loads = Shadow._as_vllm_loads

    @contextmanager
    def within(self: Shadow) -> Iterator[None]:
        with as_vllm_loads(self), torch.device("cuda", 0):
            yield

    monkeypatch.setattr(Shadow, "_as_vllm_loads", within)
    with pytest.raises(ValueError, match="is on cpu live and on cuda:0 prepared"):
        loaded.update("beside").push("b")


def test_a_pool_within_itself(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """As every start with drafts failed once: torch refuses it."""

    nobody = property(lambda _: -1, lambda *_: None)
    monkeypatch.setattr(CudaDevice, "_working_thread", nobody, raising=False)
    device = loaded.update("beside").chosen.device
    with pytest.raises(RuntimeError, match="already recording"), device.work(), device.work():
        pass


def test_an_allocation_in_the_pause(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that torch serves from its cache: at another time there is none."""
    exchange = ContentExchange._exchange

    def wasteful(self: ContentExchange, pair: Pair) -> None:
        torch.empty_like(pair.live)
        exchange(self, pair)

    monkeypatch.setattr(ContentExchange, "_exchange", wasteful)
    updated = loaded.update("beside")
    updated.prepare("b")
    with pytest.raises(AssertionError, match="allocates"):
        updated.commit()
    updated.update.discard()
