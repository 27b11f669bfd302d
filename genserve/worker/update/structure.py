"""A second model without weights: its modules, and what each of them was before anything was loaded.

Owns the storage of the parameters, which is there only while a version is built, and the way back to the bare form.
What is loaded into it, and what of that may be exchanged, is `Shadow`'s.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from genserve.worker.model.tree import MODULE_TABLES, held_by, owners

_MAX_KEPT_ELEMENTS = 1 << 16  # of a parameter that a checkpoint may lack; larger ones are constant, or never lacking

Attributes = dict[str, Any]


@dataclass(slots=True)
class _View:
    """A buffer in the storage of a parameter, such as the convolution weights of Mamba."""

    module: nn.Module
    key: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class Slot:
    """A parameter, and its first value if that was not zero: a checkpoint may lack scales, which start as -1, and does
    not cover padding."""

    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    initial: torch.Tensor | None
    views: list[_View] = field(default_factory=list)

    def allocate(self, device: torch.device) -> None:
        """Gives the parameter storage and its first value. A parameter that vLLM quantises while it loads gets none:
        vLLM allocates it when the tensors are there."""
        if self.parameter.is_meta:
            return
        data = torch.zeros(self.shape, dtype=self.dtype, device=device)
        if self.initial is not None:
            data.copy_(self.initial)
        self.parameter.data = data
        for view in self.views:
            view.module._buffers[view.key] = data.as_strided(view.size, view.stride, view.offset)

    def free(self, device: torch.device) -> None:
        """Takes the storage away."""
        if not self.parameter.is_meta:
            self.parameter.data = torch.empty(0, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Structure:
    """A model without weights, or one layer of it (`layer`). `model` finds its modules; `modules` and `parts` are the
    torch modules and the other objects that belong to it alone, each with its bare attributes; `shared` are the ids of
    tensors that the live model uses as well, such as the rotary table: they are never copied, as a step may be reading
    them. `elsewhere`: by id of a module, its attributes with tensors that lie on another device in the live model."""

    model: nn.Module
    config: VllmConfig
    model_config: ModelConfig
    slots: list[Slot]
    modules: list[tuple[nn.Module, Attributes]]
    parts: list[tuple[Any, Attributes]]
    shared: frozenset[int]
    elsewhere: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def build(
        cls, live: nn.Module, config: VllmConfig, place: torch.device, model_config: ModelConfig | None = None
    ) -> "Structure":
        """Builds the structure of `live` at `place`. `model_config`: of the live model, if it is not `config`'s.

        Call it while nothing is served: it sets torch's default dtype, which is global to the process."""
        config = with_own_registries(config)
        model_config = config.model_config if model_config is None else model_config
        with set_default_torch_dtype(model_config.dtype), place:
            model = initialize_model(vllm_config=config, model_config=model_config).eval()
        used_live = {id(value) for value in held_by(live)}
        slots = [Slot(p, p.shape, p.dtype, _initial(p)) for p in model.parameters()]
        own = [owner for owner in owners(model).values() if id(owner) not in used_live]
        modules = [(owner, _shallow_copy(vars(owner))) for owner in own if isinstance(owner, nn.Module)]
        parts = [(owner, dict(vars(owner))) for owner in own if not isinstance(owner, nn.Module)]
        shared = used_live & {id(tensor) for _, attributes in modules for tensor in _constants(attributes).values()}
        _take_views(slots, modules)
        elsewhere = tensors_elsewhere(model, live)
        return cls(model, config, model_config, slots, modules, parts, frozenset(shared), elsewhere)

    def layer(self, model: nn.Module, members: Iterable[Any], device: torch.device) -> "Structure":
        """The part of this structure that is one layer. `model` finds its modules, `members` are its modules and parts;
        buffers, and attributes that lie there in the live model, are moved to `device`."""
        own = {id(member) for member in members}
        parameters = {id(parameter) for parameter in model.parameters()}
        return replace(
            self,
            model=model,
            slots=[slot for slot in self.slots if id(slot.parameter) in parameters],
            modules=[
                (owner, _on(device, attributes, self.elsewhere.get(id(owner), ())))
                for owner, attributes in self.modules
                if id(owner) in own
            ],
            parts=[(owner, attributes) for owner, attributes in self.parts if id(owner) in own],
        )

    @property
    def num_bytes(self) -> int:
        """Size of the weights before post-processing, in bytes."""
        return sum(slot.shape.numel() * slot.dtype.itemsize for slot in self.slots)

    def allocate(self, device: torch.device) -> None:
        """Gives every parameter storage and its first value."""
        for slot in self.slots:
            slot.allocate(device)

    def strip(self, device: torch.device) -> None:
        """Takes the storage away, and gives modules and parts their bare attributes back."""
        # Copies: a version owns what was taken out, and post-processing writes into buffers.
        copies: dict[int, torch.Tensor] = {}
        for module, attributes in self.modules:
            for tensor in _constants(attributes).values():
                if id(tensor) not in self.shared and id(tensor) not in copies:
                    copies[id(tensor)] = tensor.clone()
            fresh = _shallow_copy(attributes)
            for table in (fresh, fresh["_buffers"]):
                table.update({key: copies[id(value)] for key, value in table.items() if id(value) in copies})
            vars(module).clear()
            vars(module).update(fresh)
        for part, attributes in self.parts:
            vars(part).clear()
            vars(part).update({key: copies.get(id(value), value) for key, value in attributes.items()})
        for slot in self.slots:
            slot.free(device)


def _take_views(slots: Iterable[Slot], modules: Iterable[tuple[nn.Module, Attributes]]) -> None:
    """Makes slots create the buffers that view parameters."""
    by_address = {
        slot.parameter.data_ptr(): slot for slot in slots if slot.shape.numel() and not slot.parameter.is_meta
    }
    for module, attributes in modules:
        for key, value in attributes["_buffers"].items():
            slot = None if value is None or value.is_meta else by_address.get(value.untyped_storage().data_ptr())
            if slot is not None and value.numel() > 0 and value.dtype == slot.dtype:
                slot.views.append(_View(module, key, value.shape, value.stride(), value.storage_offset()))
                attributes["_buffers"][key] = value.new_empty(0)


def with_own_registries(config: VllmConfig) -> VllmConfig:
    """A copy of the config. Layers register themselves in it by name, and the live model's are registered already."""
    apart = copy.copy(config)
    apart.compilation_config = copy.copy(config.compilation_config)
    for registry in ("static_forward_context", "static_all_moe_layers"):
        present = getattr(apart.compilation_config, registry, None)
        if present is not None:
            setattr(apart.compilation_config, registry, type(present)())
    return apart


def _initial(parameter: torch.Tensor) -> torch.Tensor | None:
    """What a new parameter holds, if a load may need it: one number if all elements are the same. None for zeros, and
    for memory that nobody has written to."""
    if parameter.is_meta or parameter.numel() == 0:
        return None
    values = parameter.detach().reshape(-1)
    sample = values[:4096].contiguous().view(torch.uint8).view(-1, values.dtype.itemsize)  # bytes: types differ in ==
    if bool((sample == sample[0]).all()):
        return values[0].clone() if bool(sample.any()) else None
    return parameter.detach().clone() if parameter.numel() <= _MAX_KEPT_ELEMENTS else None


def _constants(attributes: Attributes) -> dict[str, torch.Tensor]:
    """The buffers and the tensors among the attributes of a module."""
    found = {**attributes, **attributes["_buffers"]}
    return {k: v for k, v in found.items() if isinstance(v, torch.Tensor) and not isinstance(v, nn.Parameter)}


def _shallow_copy(attributes: Attributes) -> Attributes:
    """Copies the dict and torch's tables in it, but not their values."""
    return {key: copy.copy(value) if key in MODULE_TABLES else value for key, value in attributes.items()}


def tensors_elsewhere(model: nn.Module, live: nn.Module) -> dict[int, tuple[str, ...]]:
    """By id of a module of `model`: its attributes, neither parameters nor buffers, with tensors that lie on another
    device in `live`, such as the ones of a norm without a weight. Those that loading puts on the host are not among
    them."""
    there = owners(live)
    found = {}
    for path, owner in owners(model).items():
        if isinstance(owner, nn.Module) and path in there:
            tensors = {key: value for key, value in vars(owner).items() if isinstance(value, torch.Tensor)}
            lives = {key: vars(there[path]).get(key) for key in tensors}
            keys = [
                key
                for key, value in lives.items()
                if isinstance(value, torch.Tensor) and value.device != tensors[key].device
            ]
            found[id(owner)] = tuple(keys)
    return found


def _on(device: torch.device, attributes: Attributes, keys: Iterable[str]) -> Attributes:
    """A module's attributes with its buffers and these of its tensors on the device."""
    buffers = {key: None if buffer is None else buffer.to(device) for key, buffer in attributes["_buffers"].items()}
    return {**attributes, **{key: attributes[key].to(device) for key in keys}, "_buffers": buffers}
