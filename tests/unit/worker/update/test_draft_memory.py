"""What a device keeps for pushes, if a second model drafts: both versions are there at once. Memory is counted here,
and not taken."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from genserve.worker.model.tree import Holding
from genserve.worker.update import beside, inplace
from genserve.worker.update.beside import BesideUpdate
from genserve.worker.update.draft import WithDraft
from genserve.worker.update.inplace import InPlaceUpdate
from genserve.worker.update.shadow import Shadow
from genserve.worker.update.structure import Structure

LARGEST = torch.zeros(2, dtype=torch.uint8, device="meta")
"""Of the tensors that are exchanged: a buffer has as many bytes."""


class Pool:
    """Of a device, which keeps what was used at most. It is what updates take for a device as well."""

    keeps_addresses = True

    def __init__(self) -> None:
        self.used = self.kept = 0

    def take(self, num_bytes: int) -> None:
        self.used += num_bytes
        self.kept = max(self.kept, self.used)

    @contextmanager
    def work(self) -> Iterator[None]:
        yield


class Slot:
    """A tensor of a version."""

    def __init__(self, pool: Pool, num_bytes: int) -> None:
        self._pool, self._num_bytes, self._is_there = pool, num_bytes, False

    def allocate(self, device: torch.device) -> None:
        self._pool.take(self._num_bytes)
        self._is_there = True

    def free(self, device: torch.device) -> None:
        if self._is_there:
            self._pool.take(-self._num_bytes)
        self._is_there = False


class CountedShadow(Shadow):
    """A version of so many bytes."""

    def __init__(self, pool: Pool, num_bytes: int) -> None:
        nothing: Any = None
        slots: list[Any] = [Slot(pool, num_bytes)]
        structure = Structure(nothing, nothing, nothing, slots, modules=[], parts=[], shared=frozenset())
        super().__init__(structure, torch.device("cuda"), nullcontext)


class Counted(BesideUpdate):
    """An update of so many bytes, and its buffer."""

    def __init__(self, pool: Pool, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        device: Any = pool
        config: Any = None
        super().__init__(nn.Module(), config, device, torch.device("cuda"))

    def _shadow_of(self, config: Any, place: torch.device) -> Any:
        return CountedShadow(self._device, self._num_bytes)

    def _exchanged(self) -> dict[str, Holding]:
        return {"largest": Holding(self._live, "__dict__", "largest", LARGEST)}


def test_both_versions_and_both_buffers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is built first does not take the other's place."""
    pool = Pool()
    monkeypatch.setattr(beside, "sizes_of", lambda live: [80])
    monkeypatch.setattr(torch, "empty", lambda size, **options: Taken(pool, size))
    updates: list[Any] = [Counted(pool, 80), Counted(pool, 12)]
    WithDraft(*updates).reserve_memory()
    assert pool.kept >= 80 + 2 + 12 + 2
    assert pool.used == 2 + 2


class Taken:
    """Memory that is counted until it is let go of."""

    def __init__(self, pool: Pool, num_bytes: int) -> None:
        self._pool, self._num_bytes = pool, num_bytes
        pool.take(num_bytes)

    def __del__(self) -> None:
        self._pool.take(-self._num_bytes)


def test_in_place_the_draft_is_kept_beside_the_largest_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is prepared whole when the first layer is overwritten."""
    pool = Pool()
    monkeypatch.setattr(torch, "empty", lambda size, **options: Taken(pool, size))
    layers = {number: CountedShadow(pool, num_bytes) for number, num_bytes in enumerate((5, 9, 7))}
    monkeypatch.setattr(inplace, "layer_shadows", lambda whole, device: layers)
    monkeypatch.setattr(inplace, "LayerShadow", lambda *parts: None)
    monkeypatch.setattr(Structure, "build", lambda *parts: SimpleNamespace(model=None))
    device: Any = pool
    config: Any = None
    served = InPlaceUpdate(nn.Module(), config, device)
    monkeypatch.setattr(beside, "sizes_of", lambda live: [12])
    draft: Any = Counted(pool, 12)
    WithDraft(served, draft).reserve_memory()
    assert pool.kept >= 9 + 12 + 2
    assert pool.used == 2
