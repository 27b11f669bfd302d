"""Tensors that a sleep of level 2 drops and no push restores.

vLLM drops the memory pool in which the model was loaded. Parameters come back with the next version, buffers from the
copies of vLLM's worker. The same pool contains tensors that are neither: attributes of layers and of their objects,
such as the lock words of a Marlin kernel, and the stacks of LoRA layers. vLLM does not restore them.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn
from vllm.device_allocator import get_mem_allocator_instance

from genserve.worker.model.draft import drafting_model
from genserve.worker.model.tree import MODULE_TABLES, NOT_WEIGHTS, owners

_WEIGHTS_TAG = "weights"
# Parameters come with the next version, buffers and the KV cache are vLLM's to restore, and modules are walked anyway.
_RESTORED_ELSEWHERE = MODULE_TABLES | NOT_WEIGHTS


class SleptWeights:
    """Keeps those tensors of a worker in CPU memory while it sleeps."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._dropped = False

    def before_sleep(self, level: int) -> None:
        """Copies the tensors that a sleep of this level would drop."""
        if level < 2:
            return
        is_in_pool = _pool(self._worker.device)
        tensors = [tensor for model in self._models() for tensor in loose_tensors(model) if is_in_pool(tensor)]
        self._kept = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]
        self._dropped = True

    def after_wake_up(self) -> None:
        """Copies them back to their places. Does nothing if nothing was dropped."""
        if not self._dropped:
            return
        with torch.inference_mode():  # tensors made in this mode can be written in no other
            for tensor, kept in self._kept:
                tensor.copy_(kept)
            manager = getattr(self._worker.model_runner, "lora_manager", None)
            if manager is not None:
                _empty_slots(manager._adapter_manager)
        self._kept, self._dropped = [], False

    def _models(self) -> list[nn.Module]:
        draft = drafting_model(self._worker)
        return [self._worker.model_runner.get_model(), *([] if draft is None else [draft])]


def loose_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The tensors of a model that are neither parameters nor buffers, nor in the memory of one; each once."""
    named = [*model.parameters(), *model.buffers()]
    taken = {_address(tensor) for tensor in named if tensor.numel() > 0 and not tensor.is_meta}
    found: dict[int, torch.Tensor] = {}
    for owner in owners(model).values():
        for key, value in vars(owner).items():
            if key not in _RESTORED_ELSEWHERE:
                for tensor in _within(value):
                    if tensor.numel() > 0 and not tensor.is_meta and _address(tensor) not in taken:
                        found[id(tensor)] = tensor
    return list(found.values())


def _within(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that a value is or contains."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _within(item)
    elif isinstance(value, dict):
        yield from _within(list(value.values()))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _within([getattr(value, field.name, None) for field in fields(value)])


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _pool(device: torch.device) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor is in the memory that vLLM drops. On the CPU vLLM drops nothing, and all tensors count, for
    tests."""
    if device.type == "cpu":
        return lambda tensor: tensor.device.type == "cpu"
    # internal: the allocations of vLLM's pools, by address.
    allocator: Any = get_mem_allocator_instance()
    allocations = allocator.pointer_to_data.items()
    ranges = [(start, start + data.handle[1]) for start, data in allocations if data.tag == _WEIGHTS_TAG]
    return lambda tensor: any(start <= tensor.data_ptr() < end for start, end in ranges)


def _empty_slots(manager: Any) -> None:
    """Takes adapters out of the slots on the device: the next request that uses one copies it there again from the
    host, and makes the tensors that tell kernels about slots anew. Empty slots hold zeros, as vLLM makes them: on the
    CPU its kernels read one for requests without an adapter."""
    # internal: vLLM's LoRA manager.
    for lora_id in list(manager._active_adapters):
        manager.deactivate_adapter(lora_id)
    for module in manager.modules.values():
        for index in range(manager.lora_slots):
            module.reset_lora(index)
            if hasattr(module, "reset_module_to_save"):
                module.reset_module_to_save(index)
    manager._last_mapping = manager._last_slot_layout = None
