"""What a version that is built beside the live one is checked for; without an engine."""

from collections.abc import Iterable, Iterator
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from genserve.worker.model.tree import Holding, holdings
from genserve.worker.update.beside import BesideUpdate
from genserve.worker.update.device import Device

CPU = Device(torch.device("cpu"))


def model() -> nn.Module:
    """Two layers."""
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


class Shadow:
    """A second model that takes tensors by name."""

    def __init__(self) -> None:
        self.model = model()
        self.constants: Any = None
        self.untouched = frozenset[str]()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Holding]:
        """Without post-processing."""
        loaded = model()
        loaded.load_state_dict(dict(tensors))
        return holdings(loaded)

    def strip(self) -> None:
        """Nothing was put into it."""


class WithShadow(BesideUpdate):
    """An update with that one."""

    def _shadow_of(self, config: Any, place: torch.device) -> Any:
        return Shadow()


def test_what_a_step_hides_while_the_bytes_arrive_is_refused() -> None:
    """The wait for them may take minutes, in which the first request of a kind comes."""
    live = model()
    config: Any = None
    update = WithShadow(live, config, CPU, CPU.device)
    update.audit()

    def arriving() -> Iterator[tuple[str, torch.Tensor]]:
        yield from model().state_dict().items()
        live[1].kernel = SimpleNamespace(scale=live[1].weight.detach() + 1)

    with pytest.raises(ValueError, match=r"leave 1\.kernel\.scale"):
        update.prepare(arriving(), Event())
