"""What a worker keeps through a sleep of level 2: what lies in the model's pool and is neither parameter nor buffer."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from genserve.worker.model.slept import SleptWeights, loose_tensors


@dataclass
class Scales:
    """Stands for a dataclass of vLLM's that holds tensors."""

    first: torch.Tensor
    note: str = "no tensor"


class Kernel:
    """Stands for an object of vLLM's that hangs on a layer."""

    __module__ = "vllm.model_executor.kernels"

    def __init__(self, layer: nn.Module) -> None:
        self.weight = layer.weight
        self.locks = torch.full((3,), 3.0)
        self.scales = {"all": [Scales(torch.full((2,), 2.0))]}


class FakeSlots:
    """A layer with slots for two adapters, and a whole module in each."""

    def __init__(self) -> None:
        self.stack = torch.full((2, 3), 6.0)
        self.whole = [True, True]

    def reset_lora(self, index: int) -> None:
        self.stack[index] = 0

    def reset_module_to_save(self, index: int) -> None:
        self.whole[index] = False


class FakeLoras:
    """vLLM's LoRA manager, as far as it is asked."""

    def __init__(self) -> None:
        self.modules = {"layer": FakeSlots()}
        self.lora_slots = 2
        self._active_adapters = {7: None, 8: None}
        self._last_mapping: Any = "mapping"
        self._last_slot_layout: Any = "layout"

    def deactivate_adapter(self, lora_id: int) -> None:
        del self._active_adapters[lora_id]


def layer() -> Any:
    """A layer with everything that may hold tensors."""
    made = nn.Linear(2, 2, bias=False)
    made.register_buffer("table", torch.ones(4))
    vars(made).update(
        lock=torch.full((5,), 5.0),
        kernel=Kernel(made),
        view=made.weight.data[0],
        kv_cache=torch.ones(9),
        nothing=torch.empty(0),
        elsewhere=torch.empty(6, device="meta"),
    )
    return made


def worker(model: nn.Module, draft: nn.Module | None = None, loras: FakeLoras | None = None) -> Any:
    """A worker on the CPU, where tests are what drops weights."""
    runner = SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: draft)
    if loras is not None:
        runner.lora_manager = SimpleNamespace(_adapter_manager=loras)
    return SimpleNamespace(device=torch.device("cpu"), model_runner=runner)


def test_loose_tensors_are_those_that_no_version_and_no_buffer_brings() -> None:
    """Found in attributes, in what hangs on layers, in containers and dataclasses; not the KV cache, nor a view of a
    weight."""
    assert sorted(float(tensor[0]) for tensor in loose_tensors(nn.Sequential(layer()))) == [2.0, 3.0, 5.0]


def test_what_a_sleep_of_level_2_drops_is_put_back_in_place() -> None:
    """Kernels have captured the addresses. Of the draft model as well."""
    model, draft = layer(), layer()
    slept = SleptWeights(worker(nn.Sequential(model), nn.Sequential(draft)))
    tensors = loose_tensors(nn.Sequential(model, draft))
    before = [(tensor.data_ptr(), tensor.clone()) for tensor in tensors]
    assert len(before) == 6
    slept.before_sleep(2)
    for tensor in tensors:
        tensor.fill_(float("nan"))
    slept.after_wake_up()
    assert all(t.data_ptr() == at and torch.equal(t, value) for t, (at, value) in zip(tensors, before, strict=True))
    tensors[0].fill_(9.0)
    slept.after_wake_up()  # a second one, of an engine that is awake
    assert float(tensors[0][0]) == 9.0


def test_tensors_made_in_inference_mode_are_put_back() -> None:
    """torch refuses to write to them in any other mode."""
    model = nn.Linear(1, 1)
    with torch.inference_mode():
        model.__dict__["lock"] = torch.full((2,), 4.0)
    slept = SleptWeights(worker(model))
    slept.before_sleep(2)
    with torch.inference_mode():
        model.lock.zero_()
    slept.after_wake_up()
    assert float(model.lock[0]) == 4.0


def test_a_sleep_of_level_1_needs_nothing_kept() -> None:
    """vLLM has all of it on the host."""
    model, loras = layer(), FakeLoras()
    slept = SleptWeights(worker(model, loras=loras))
    slept.before_sleep(1)
    model.lock.fill_(8.0)
    slept.after_wake_up()
    assert float(model.lock[0]) == 8.0
    assert len(loras._active_adapters) == 2


def test_adapters_are_copied_to_the_device_again_after_a_sleep_of_level_2() -> None:
    """Their slots were dropped: none is taken for filled, nor the tensors that describe them for up to date. Empty
    ones hold zeros."""
    loras = FakeLoras()
    slept = SleptWeights(worker(nn.Linear(1, 1), loras=loras))
    slept.before_sleep(2)
    slept.after_wake_up()
    assert (loras._active_adapters, loras._last_mapping, loras._last_slot_layout) == ({}, None, None)
    slots = loras.modules["layer"]
    assert not slots.stack.any()
    assert slots.whole == [False, False]
