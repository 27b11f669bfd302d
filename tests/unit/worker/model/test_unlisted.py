"""A tensor that steps have made and that no table has: the source shows that it is harmless, or the push is refused.

The layers below stand for those of a new vLLM. A push must never leave what one of them has made of the old weights.
"""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from genserve.worker.model import unlisted
from genserve.worker.model.step_source import is_made_every_step
from genserve.worker.model.tree import holdings
from genserve.worker.update.device import Device
from genserve.worker.update.exchange import exchange
from tests.support.kept_device import KeptDevice

CPU = Device(torch.device("cpu"))
FACTOR = 3


class Layer(nn.Module):
    """With a weight."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), value), requires_grad=False)
        self.kept: Any = None
        self.ready = False
        self.size = 4


class Cached(Layer):
    """Keeps a copy of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        if self.kept is None:
            self.kept = self.weight.double() * 2
        return x + self.kept


class Returned(Layer):
    """As the one before, in another method."""

    def _copy(self) -> torch.Tensor:
        if self.kept is not None:
            return self.kept
        self.kept = self.weight.double() * 2
        return self.kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        return x + self._copy()


class Unset(Layer):
    """Has the attribute only when a step has made it."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        del self.kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        if not hasattr(self, "kept") or self.kept.device != x.device:
            self.kept = self.weight.double() * 2
        return x + self.kept


class Flagged(Layer):
    """Remembers in a flag that it has the copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        if not self.ready:
            self.kept = self.weight.double() * 2
            self.ready = True
        return x + self.kept


class Filled(Layer):
    """Allocates where there is nothing, and remembers in a flag that it has filled it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        if self.kept is None:
            self.kept = torch.zeros(self.size, device=x.device, dtype=torch.float64)
        if not self.ready:
            self.kept.copy_(self.weight)
            self.ready = True
        return x + self.kept


class Once(Layer):
    """Makes it in a method that each step could call, and only the first one does."""

    def forward_once(self) -> None:
        """Not in each step."""
        if self.ready:
            return
        self.kept = self.weight.double() * 2
        self.ready = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        self.forward_once()
        return x + self.kept


class Hidden(Layer):
    """As the one before, and the step asks if it is there."""

    def forward_once(self) -> None:
        """Not in each step."""
        self.kept = self.weight.double() * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        if not self.ready:
            self.forward_once()
            self.ready = True
        return x + self.kept


class Running(Layer):
    """Adds to what the step before has left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        before = self.kept
        self.kept = self.weight.double() * 2 if before is None else before
        return x + self.kept


class Fresh(Layer):
    """Hands something to another method of the same step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        with torch.inference_mode():
            self.kept = x.double() + self.weight
        return self.kept


class Table(Layer):
    """Makes a table out of numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        if self.kept is None:
            self.kept = torch.arange(self.size, dtype=torch.float64, device=x.device).unsqueeze(0) * FACTOR + 1
        return x + self.kept


class Scaled(Layer):
    """Makes a table out of a number that loading sets."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.scale = value * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        if self.kept is None:
            self.kept = torch.full((self.size,), self.scale, dtype=torch.float64)
        return x + self.kept


class View(Layer):
    """Keeps a part of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A step."""
        if self.kept is None:
            self.kept = self.weight.data[1:]
        return x[1:] + self.kept


X = torch.zeros(4)
REFUSED = (Cached, Returned, Unset, Scaled, Flagged, Filled, Once, Hidden, Running)


def model(kind: type[Layer], value: float) -> Any:
    """One layer, as it is loaded."""
    return nn.Sequential(kind(value))


def pushed(kind: type[Layer], device: Device) -> tuple[Any, Any]:
    """A model that has run a step, and the exchange with weights of 2 for its 1."""
    live, prepared = model(kind, 1.0), model(kind, 2.0)
    live(X)
    return live, exchange(holdings(live), holdings(prepared), device)


@pytest.fixture(autouse=True)
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(unlisted, "_warned", set())


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("device", [CPU, KeptDevice()])
def test_a_tensor_made_of_weights_is_refused(kind: type[Layer], device: Device) -> None:
    """The next steps would go on to read it."""
    with pytest.raises(ValueError, match=r"steps have made 0\.kept"):
        pushed(kind, device)


@pytest.mark.parametrize("device", [CPU, KeptDevice()])
@pytest.mark.parametrize(("kind", "says"), [(Table, "made without weights"), (Fresh, "each step makes it anew")])
def test_a_harmless_tensor_is_kept_with_a_warning(
    kind: type[Layer], says: str, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """A push leaves it where it is. The log says it once."""
    for _ in range(2):
        live, exchanged = pushed(kind, device)
        before = live[0].kept
        exchanged.overwrite()
        assert live[0].kept is before
        assert live(X).tolist() == model(kind, 2.0)(X).tolist()
    assert len(caplog.records) == 1
    assert says in caplog.records[0].getMessage()
    assert caplog.records[0].levelno == logging.WARNING


def test_a_table_that_was_written_to_is_not_proven() -> None:
    """Its contents are not what making it again gives: something else has gone in."""
    live, prepared = model(Table, 1.0), model(Table, 2.0)
    live(X)
    live[0].kept += 1
    with pytest.raises(ValueError, match=r"have made 0\.kept"):
        exchange(holdings(live), holdings(prepared), KeptDevice())


def test_a_view_of_a_weight_changes_with_it_where_contents_are_copied() -> None:
    """Where references are exchanged, it stays behind."""
    live, exchanged = pushed(View, KeptDevice())
    exchanged.overwrite()
    assert live(X).tolist() == [2.0] * 3
    with pytest.raises(ValueError, match=r"have made 0\.kept"):
        pushed(View, CPU)


@pytest.mark.parametrize(
    "kind", [Cached, Returned, Unset, Flagged, Once, Hidden, Running, type("Unread", (Layer,), {})]
)
def test_the_source_shows_whether_each_step_makes_a_tensor_anew(kind: type[Layer]) -> None:
    """Whatever cannot be read there is no evidence."""
    assert not is_made_every_step(kind, "kept")
    assert is_made_every_step(Fresh, "kept") and not is_made_every_step(Fresh, "size"), "construction alone sets it"
