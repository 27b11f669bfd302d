"""A tensor that steps have made and no table knows: a push is refused, because it may be made of the old weights.

The layers below stand for those of a new vLLM.
"""

from typing import Any

import pytest
import torch
from torch import nn

from genserve.worker.model.audit import audit
from genserve.worker.model.step_made import MadeSince
from genserve.worker.model.tree import holdings
from genserve.worker.update.device import Device
from genserve.worker.update.exchange import exchange
from tests.support.kept_device import KeptDevice

CPU = Device(torch.device("cpu"))


class Layer(nn.Module):
    """With a weight."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value), requires_grad=False)
        self.kept: Any = None


class Cached(Layer):
    """Keeps a copy of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        if self.kept is None:
            self.kept = self.weight.double() * 2
        return x + self.kept


class Unset(Layer):
    """Has the attribute only when a step has made it."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        del self.kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        if not hasattr(self, "kept"):
            self.kept = float(self.weight[0]) * 2
        return x + self.kept


class Zeros(Layer):
    """Looks as if it were made without weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        if self.kept is None:
            self.kept = torch.zeros(4, dtype=torch.float64)
            self.kept += self.weight
        return x + self.kept


class View(Layer):
    """Keeps a part of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        if self.kept is None:
            self.kept = self.weight.data[1:]
        return x[1:] + self.kept


X = torch.zeros(4)
REFUSED = (Cached, Unset, Zeros)


def model(kind: type[Layer], value: float) -> Any:
    """One layer, as it is loaded."""
    return nn.Sequential(kind(value))


def pushed(kind: type[Layer], device: Device) -> tuple[Any, Any]:
    """A model that has run a step, and the exchange with weights of 2 for its 1."""
    live, prepared = model(kind, 1.0), model(kind, 2.0)
    live(X)
    return live, exchange(holdings(live), holdings(prepared), device)


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("device", [CPU, KeptDevice()])
def test_a_tensor_made_of_weights_is_refused(kind: type[Layer], device: Device) -> None:
    """The next steps would go on to read it. The audit before a push refuses it already."""
    with pytest.raises(ValueError, match=r"steps have made 0\.kept"):
        pushed(kind, device)
    live, bare = model(kind, 1.0), model(kind, 1.0)
    loaded = holdings(live).keys()
    live(X)
    with pytest.raises(ValueError, match=r"have made 0\.kept"):
        audit(live, bare, copied=device.keeps_addresses, loaded=loaded)


def test_a_view_of_a_weight_changes_with_it_where_contents_are_copied() -> None:
    """Where references are exchanged, it stays behind."""
    live, exchanged = pushed(View, KeptDevice())
    exchanged.overwrite()
    assert live(X).tolist() == [2.0] * 3
    with pytest.raises(ValueError, match=r"have made 0\.kept"):
        pushed(View, CPU)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_made_of_weights_before_a_commit_that_waited_is_found(kind: type[Layer]) -> None:
    """The exchange was built before that."""
    live = model(kind, 1.0)
    since = MadeSince(live)
    since.check()
    live(X)
    with pytest.raises(RuntimeError, match=r"push it again: steps have made 0\.kept"):
        since.check()
    MadeSince(live).check()
