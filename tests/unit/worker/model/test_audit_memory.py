"""How many bytes a model reaches, by what an exchange does with them."""

import functools
from typing import Any

import torch

from genserve.worker.model.audit import KINDS, model_memory
from tests.unit.worker.hidden_weights import Plain, closure, experts, model

FLOAT = 4


class B12xExperts:
    """As vLLM's, which keeps ones."""

    def __init__(self) -> None:
        self._unit_scales = {"cpu": torch.ones(30)}


def sizes(live: Any, *constants: str) -> tuple[int, ...]:
    """Floats of each kind."""
    found = model_memory(live, constants)
    assert found.keys() == {"reachable", *KINDS}
    assert found["reachable"] == sum(found[kind] for kind in KINDS)
    return tuple(found[kind] // FLOAT for kind in KINDS)


def test_every_memory_counts_once_by_what_an_exchange_does_with_it() -> None:
    """Exchanged, keys and values, constant, and the rest; however many look into it, and whatever has no contents."""
    live = model()  # two weights of four floats
    assert sizes(live) == (8, 0, 0, 0)
    layer = experts(live)
    layer.derived = torch.ones(3)
    layer.views = [layer.w13_weight, layer.w13_weight.data[1:], torch.empty(9, device="meta")]
    layer.cpu_linear = closure(torch.ones(100))
    assert sizes(live) == (8 + 3 + 100, 0, 0, 0)
    layer.kv_cache = [torch.ones(1000), {"scales": torch.ones(2000)}]
    layer.keys = (layer.kv_cache[0][:500],)
    assert sizes(live) == (111, 3000, 0, 0)
    layer.kernel = [B12xExperts(), Plain(table=torch.ones(7)), functools.partial(torch.mul, torch.ones(5))]
    path = "model.layers.0.mlp.experts.kernel[1].table"
    assert sizes(live, path) == (111, 3000, 30 + 7, 5)
    assert sizes(live) == (111, 3000, 30, 12)


def test_a_reference_that_an_exchange_reaches_counts_for_all() -> None:
    """In whatever order they come."""
    live = model()
    first, second = experts(live, 0), experts(live, 1)
    first.kernel, second.kernel = [second.w13_weight.data[:2]], [first.w13_weight.data[:2]]
    assert sizes(live) == (8, 0, 0, 0)
