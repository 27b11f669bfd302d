"""Exchanging weights of small modules, without an engine."""

from typing import Any

import pytest
import torch
from torch import nn

from genserve.worker.exchange import Exchange
from genserve.worker.tree import holdings


class Packed(nn.Module):
    """A layer as vLLM leaves it on the CPU: an empty parameter, and the weight in a closure."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.full((4,), value))
        self.register_buffer("scale", torch.full((2,), value))
        self.derived = torch.full((3,), value)
        self.kv_cache = torch.zeros(2)
        weight = torch.full((1,), value)
        self.cpu_linear = lambda x: x * weight

    def seen(self) -> list[float]:
        """What the layer computes with, by place."""
        packed = self.cpu_linear(torch.ones(1))
        return [float(t[0]) for t in (self.norm, self.scale, self.derived, packed)]


@pytest.mark.parametrize("captured", [False, True])
def test_a_commit_exchanges_every_place_and_a_rollback_puts_it_back(captured: bool) -> None:
    """Parameters, buffers, derived tensors and closures change together; the KV cache never."""
    live, prepared = Packed(1.0), Packed(2.0)
    if captured:
        live.__dict__["cpu_linear"] = prepared.__dict__["cpu_linear"] = len  # no closures where addresses are captured
    norm, cache, address = live.norm, live.kv_cache, live.norm.data_ptr()
    exchange = Exchange(holdings(live), holdings(prepared), addresses_captured=captured)
    exchange.commit()
    assert [float(live.norm[0]), float(live.scale[0]), float(live.derived[0])] == [2.0, 2.0, 2.0]
    assert captured or live.seen() == [2.0] * 4
    assert (live.norm.data_ptr() == address) == captured
    exchange.rollback()
    assert [float(live.norm[0]), float(live.scale[0]), float(live.derived[0])] == [1.0, 1.0, 1.0]
    assert captured or live.seen() == [1.0] * 4
    assert live.norm is norm
    assert live.kv_cache is cache


@pytest.mark.parametrize("lost", ["norm", "scale", "cpu_linear"])
def test_a_value_that_is_not_put_in_place_is_noticed(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No exchange is acknowledged that did not happen."""
    put = Exchange._put
    monkeypatch.setattr(Exchange, "_put", lambda self, entry, value: entry.name == lost or put(self, entry, value))
    exchange = Exchange(holdings(Packed(1.0)), holdings(Packed(2.0)), addresses_captured=False)
    with pytest.raises(RuntimeError, match=f"{lost} did not take"):
        exchange.commit()


def test_a_rollback_without_a_commit_changes_nothing() -> None:
    """A rank whose commit never began is rolled back like the others."""
    live = Packed(1.0)
    Exchange(holdings(live), holdings(Packed(2.0)), addresses_captured=False).rollback()
    assert live.seen() == [1.0] * 4


def with_attribute(name: str, value: Any) -> Packed:
    """A prepared layer that differs in one place."""
    layer = Packed(2.0)
    if isinstance(value, nn.Parameter):
        layer.norm = value
    else:
        layer.__dict__[name] = value
    return layer


@pytest.mark.parametrize(
    ("prepared", "says"),
    [
        (with_attribute("extra", torch.ones(1)), "only prepared"),
        (with_attribute("norm", nn.Parameter(torch.ones(5))), "norm is"),
        (with_attribute("norm", nn.Parameter(torch.ones(4, dtype=torch.float16))), "norm is"),
        (with_attribute("derived", lambda x: x), "derived is"),
    ],
)
def test_a_prepared_model_of_another_structure_is_refused(prepared: Packed, says: str) -> None:
    """Before anything is exchanged, naming the place."""
    live = Packed(1.0)
    with pytest.raises(ValueError, match=says):
        Exchange(holdings(live), holdings(prepared), addresses_captured=False)
    assert live.seen() == [1.0] * 4
