"""What steps make on a live model, and whether a push may leave it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from torch import nn

from genserve.worker.model.audit import audit
from genserve.worker.model.step_made import FROM_NUMBERS, FROM_WEIGHTS, WEIGHT_FREE, Row
from genserve.worker.model.tree import holdings
from genserve.worker.update.device import Device
from genserve.worker.update.exchange import PointerExchange, exchange, matched
from tests.support.kept_device import KeptDevice

CPU = Device(torch.device("cpu"))


class FlashInferImpl:
    """As vLLM's attention on FlashInfer, which computes its scale in the first step."""

    __module__ = "vllm.v1.attention.backends.flashinfer"

    def __init__(self) -> None:
        self.scale = 0.5
        self.bmm1_scale: float | None = None

    def forward(self, layer: Any) -> None:
        """As vLLM's."""
        if self.bmm1_scale is None:
            self.bmm1_scale = self.scale * layer._k_scale_float


class InklingSinkExperts(nn.Module):
    """As vLLM's, which makes ones in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self._unit: torch.Tensor | None = None


class Layer(nn.Module):
    """With attention, a number that loading sets, and whatever a step makes."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self._k_scale_float = 1.0
        self.impl = FlashInferImpl()
        self.experts = InklingSinkExperts()


def model(value: float = 1.0) -> Any:
    """One layer."""
    return nn.Sequential(Layer(value))


def of_a_step() -> torch.Tensor:
    """A tensor that a step has made."""
    with torch.inference_mode():
        return torch.ones(2)


MADE: dict[str, Any] = {
    "0._o_scale_float": 2.0,
    "0.impl.o_sf_scale": 2.0,
    "0.impl.packed": torch.ones(2),
    "0._wp_fp32": torch.ones(2),
    "0.experts.unit": of_a_step(),
}
"""Numbers and tensors of no table, on layers and on what hangs on them."""


def put(live: nn.Module, name: str, value: Any) -> None:
    """As a step does."""
    owner: Any = live
    *path, key = name.split(".")
    for step in path:
        owner = owner[int(step)] if step.isdigit() else getattr(owner, step)
    setattr(owner, key, value)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("device", [CPU, KeptDevice()])
def test_what_a_step_has_made_is_refused_before_anything_is_exchanged(name: str, device: Device) -> None:
    """It may be out of weights, and a push would leave it; by its path."""
    live = model()
    put(live, name, MADE[name])
    with pytest.raises(ValueError, match=rf"steps have made {re.escape(name)} \(1 in all\)"):
        exchange(holdings(live), holdings(model(2.0)), device)
    assert live[0].weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", MADE)
def test_an_audit_refuses_it_too_once_it_knows_what_was_loaded(name: str) -> None:
    """As at the start on a GPU, where warming up is a step."""
    live = model()
    loaded = holdings(live).keys()
    known = audit(live, model(), copied=True, loaded=loaded)
    put(live, name, MADE[name])
    for each in (None, known):
        with pytest.raises(ValueError, match=rf"steps have made {re.escape(name)} \(1 in all\)"):
            audit(live, model(), copied=True, known=each, loaded=loaded)


def test_what_preparing_found_and_did_not_write_is_no_weight() -> None:
    """A table that construction has made on a part of a layer."""
    live, prepared = model(), model(2.0)
    for each in (live, prepared):
        each[0].impl.table = torch.ones(2)
    written = {name: place for name, place in holdings(prepared).items() if name != "0.impl.table"}
    with pytest.raises(ValueError, match=r"0\.impl\.table"):
        matched(holdings(live), written)
    assert "0.impl.table" not in [entry.name for entry in matched(holdings(live), written, {"0.impl.table"})]


def test_a_table_that_depends_on_no_weight_is_left() -> None:
    """Through audits and pushes, also where loading makes one of another shape. What no step has made is refused."""
    live, prepared = model(), model(2.0)
    loaded = holdings(live).keys()
    unit = live[0].experts._unit = of_a_step()
    audit(live, model(), copied=True, loaded=loaded)
    exchanged = exchange(holdings(live), holdings(prepared), CPU)
    assert isinstance(exchanged, PointerExchange)
    exchanged.commit()
    assert (live[0].weight.tolist(), live[0].experts._unit is unit) == ([2.0, 2.0], True)
    prepared[0].experts._unit = torch.ones(5)
    assert "0.experts._unit" not in [entry.name for entry in matched(holdings(live), holdings(prepared))]
    live[0].experts._unit = torch.ones(2)
    with pytest.raises(ValueError, match=r"0\.experts\._unit"):
        audit(live, model(), copied=True, loaded=loaded)


@pytest.mark.parametrize("device", [CPU, KeptDevice()])
def test_number_computed_by_a_step_is_valid_while_its_inputs_stay(device: Device) -> None:
    """And the version that changes one is refused: the step computes no second time."""
    live, prepared = model(), model(2.0)
    loaded = holdings(live).keys()
    live[0].impl.forward(live[0])
    audit(live, model(), copied=True, loaded=loaded)
    exchange(holdings(live), holdings(prepared), device)
    prepared[0]._k_scale_float = 3.0
    with pytest.raises(ValueError, match=r"0\._k_scale_float changes, .* computed 0\.impl\.bmm1_scale"):
        exchange(holdings(live), holdings(prepared), device)


def test_state_of_requests_that_lies_on_a_layer_is_left_whatever_its_size() -> None:
    """Mamba's trackers are empty until the KV cache is bound, and a push would empty them again."""
    live, prepared = model(), model(2.0)
    for each, size in ((live, 5), (prepared, 0)):
        each[0].mixer = type("MambaMixer2", (nn.Module,), {})()
        each[0].mixer._replayssm_ring_start = torch.zeros(size, dtype=torch.int32)
    exchange(holdings(live), holdings(prepared), CPU).commit()
    assert live[0].mixer._replayssm_ring_start.shape == (5,)


def test_adapters_that_experts_keep_are_nothing_that_a_step_has_made() -> None:
    """They hang on a layer, and change places with LoadLora."""
    live = model()
    context = type("MoELoRAContext", (), {"__module__": "vllm.model_executor.layers.fused_moe.experts.lora_context"})()
    context.adapter_enabled = torch.ones(2)
    live[0].impl._lora_context = context
    exchange(holdings(live), holdings(model(2.0)), CPU)


@pytest.mark.parametrize("row", FROM_WEIGHTS, ids=lambda row: f"{row.owner}.{row.key}")
def test_layer_whose_first_step_derives_from_weights_is_refused_at_start(row: Any) -> None:
    """Before there is such a step, and also when it has been: by path, with what it makes."""
    kind = type(row.owner, (nn.Module,), {})
    for value in (None, False, torch.ones(2)):
        live = nn.Sequential(kind())
        setattr(live[0], row.key, value)
        with pytest.raises(ValueError, match=rf"0\.{row.key}: the first step makes {row.made} from weights"):
            audit(live, nn.Sequential(kind()), copied=True)
    live = nn.Sequential(kind())  # of another model that calls its layer the same
    audit(live, nn.Sequential(kind()), copied=True)


def test_a_runner_of_experts_that_joins_no_gates_is_not_refused() -> None:
    """All have the attribute."""
    live = nn.Sequential(type("MoERunner", (nn.Module,), {})())
    live[0]._combined_gate_weight, live[0]._fse_fuse_gate = None, False
    audit(live, live, copied=True)
    live[0]._fse_fuse_gate = True
    with pytest.raises(ValueError, match=r"0\._combined_gate_weight"):
        audit(live, live, copied=True)


def classes(row: Any) -> Iterator[ast.ClassDef]:
    """Of that name, in the row's file or, for those that others write to, in attention.py."""
    root = Path(vllm.__file__).parent
    for file in (row.file, "model_executor/layers/attention/attention.py"):
        for node in ast.walk(ast.parse((root / file).read_text())):
            if isinstance(node, ast.ClassDef) and row.owner in ("", node.name):
                yield node


@pytest.mark.parametrize("row", [*WEIGHT_FREE, *FROM_NUMBERS, *FROM_WEIGHTS], ids=lambda row: f"{row.file}:{row.owner}")
def test_vllm_still_makes_what_the_tables_say(row: Any) -> None:
    """By class and attribute, in that file."""
    if isinstance(row, Row) and row.since > vllm.__version_tuple__[:2]:
        pytest.skip(f"vLLM has it from {row.since} on")
    assert any(classes(row)), row.owner
    source = (Path(vllm.__file__).parent / row.file).read_text()
    for key in row.keys if isinstance(row, Row) else [row.key]:
        assert re.search(rf"\b{key}\b", source), key
