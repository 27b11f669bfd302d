"""A second model beside the live one, without weights between pushes.

Its structure is built once, while nothing is served: building sets torch's default dtype, which is global to the
process and would reach the live model's steps. A push gives it storage, loads and post-processes in a background
thread, takes the finished tensors out, and leaves it bare again.
"""

import copy
import inspect
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_processing,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from genserve.worker.model.audit import Constants
from genserve.worker.model.tree import Holding, held_by, holdings, owners
from genserve.worker.update.device import Device

_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_MAX_KEPT_ELEMENTS = 1 << 16  # of a parameter that a checkpoint may lack; larger ones are constant, or never lacking


class PrepareCancelledError(Exception):
    """The push was given up while it was prepared."""


@dataclass(slots=True)
class _View:
    """A buffer in the storage of a parameter, such as the convolution weights of Mamba."""

    module: nn.Module
    key: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Slot:
    """A parameter, and what it was as its layer made it, unless that was zero: checkpoints leave out scales, which
    start as -1, and do not cover padding."""

    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    initial: torch.Tensor | None
    views: list[_View] = field(default_factory=list)

    def allocate(self, device: torch.device) -> None:
        """Gives the parameter storage and its first value. One that is quantised as it is loaded gets none: vLLM makes
        that when the tensors are there."""
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


class Shadow:
    """Builds versions of the weights in exactly the form that the live model holds them."""

    def __init__(
        self,
        live: nn.Module,
        config: VllmConfig,
        place: torch.device,
        device: Device,
        model_config: ModelConfig | None = None,
    ) -> None:
        """`device`: the live model's; `place`: where the versions are built, there or on the host; `model_config`: of
        the live model, if it is not `config`'s."""
        self._config = _apart(config)
        self._device = place
        self._loading = device.loading
        model_config = self._model_config = config.model_config if model_config is None else model_config
        with set_default_torch_dtype(model_config.dtype), place:
            self._model = initialize_model(vllm_config=self._config, model_config=model_config).eval()
        shared = {id(value) for value in held_by(live)}
        self._slots = [_Slot(p, p.shape, p.dtype, _initial(p)) for p in self._model.parameters()]
        # What the live model uses as well, such as the rotary table, is left alone: a step may be under way in it.
        own = [owner for owner in owners(self._model).values() if id(owner) not in shared]
        self._bare = [(owner, _shallow_copy(vars(owner))) for owner in own if isinstance(owner, nn.Module)]
        self._bare_parts = [(owner, dict(vars(owner))) for owner in own if not isinstance(owner, nn.Module)]
        self._shared = shared & {
            id(tensor) for _, attributes in self._bare for tensor in _constants(attributes).values()
        }
        self._take_views()
        self._stripped: dict[int, dict[str, Any]] = {}
        self._versions: dict[int, int] = {}
        self.constants: Constants | None = None  # what loading must not write, once a live model was audited
        self.untouched: frozenset[str] = frozenset()  # names of what the last load found, and did not write
        self.strip()

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """What a version takes is allocated within the block: a device keeps that memory for pushes. The host does
        not."""
        if self._device.type == "cpu":
            yield
            return
        try:
            for slot in self._slots:
                slot.allocate(self._device)
            yield
        finally:
            self.strip()

    @property
    def structure(self) -> nn.Module:
        """The model without weights, between pushes."""
        return self._model

    @property
    def num_bytes(self) -> int:
        """Size of the weights, in bytes, before post-processing."""
        return sum(slot.shape.numel() * slot.dtype.itemsize for slot in self._slots)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Holding]:
        """Loads and post-processes a complete version; returns what a live model of that version holds.

        Raises ValueError naming parameters that the tensors left without a value, or what post-processing wrote where
        it cannot be exchanged, and whatever the loader raises.
        """
        for slot in self._slots:
            slot.allocate(self._device)
        with self.loading():
            online = [module for module in self._model.modules() if _is_quantised_online(module)]
            for module in online:
                initialize_online_processing(module)  # vLLM does so when it builds a layer, for one load
            expected = self._expected()
            with self._loading():
                loaded = self._model.load_weights(tensors)
            missing = self._missing(expected, set(expected if loaded is None else loaded))
            if missing:
                raise ValueError(f"no tensor gave a value to {', '.join(missing[:8])} ({len(missing)} in all)")
            if online:
                finalize_layerwise_processing(self._model, self._model_config)
            process_weights_after_loading(self._model, self._model_config, self._device)
        return self.written()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """What vLLM loads and post-processes weights under, for this thread alone."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(set_current_vllm_config(self._config))
            stack.enter_context(self._device)
            stack.enter_context(_default_dtype_here(self._model_config.dtype))
            yield

    def written(self) -> dict[str, Holding]:
        """What loading and post-processing may have written. Raises ValueError for what cannot be exchanged."""
        self._refuse_containers()
        if self.constants is not None:
            self.constants.check()
        present = holdings(self._model)
        written = {name: place for name, place in present.items() if self._is_written(place)}
        for name, place in written.items():
            self._refuse(name, place)
        self.untouched = frozenset(present.keys() - written.keys())
        return written

    def strip(self) -> None:
        """Takes everything out again: the structure stays, without storage and as it was before post-processing."""
        # Copies: what was taken out belongs to a version, and post-processing writes into buffers.
        copies: dict[int, torch.Tensor] = {}
        for module, attributes in self._bare:
            for tensor in _constants(attributes).values():
                if id(tensor) not in self._shared and id(tensor) not in copies:
                    copies[id(tensor)] = tensor.clone()
            fresh = _shallow_copy(attributes)
            for table in (fresh, fresh["_buffers"]):
                table.update({key: copies[id(value)] for key, value in table.items() if id(value) in copies})
            vars(module).clear()
            vars(module).update(fresh)
        for part, attributes in self._bare_parts:
            vars(part).clear()
            vars(part).update({key: copies.get(id(value), value) for key, value in attributes.items()})
        for slot in self._slots:
            slot.free(self._device)
        self._stripped = {id(owner): dict(vars(owner)) for owner, _ in [*self._bare, *self._bare_parts]}
        self._versions = {
            id(value): value._version
            for part, _ in self._bare_parts
            for value in vars(part).values()
            if isinstance(value, torch.Tensor)
        }

    def _take_views(self) -> None:
        """Leaves it to slots to make the buffers that look into parameters."""
        slots = {
            slot.parameter.data_ptr(): slot for slot in self._slots if slot.shape.numel() and not slot.parameter.is_meta
        }
        for module, attributes in self._bare:
            for key, value in attributes["_buffers"].items():
                slot = None if value is None or value.is_meta else slots.get(value.untyped_storage().data_ptr())
                if slot is not None and value.numel() > 0 and value.dtype == slot.dtype:
                    slot.views.append(_View(module, key, value.shape, value.stride(), value.storage_offset()))
                    attributes["_buffers"][key] = value.new_empty(0)

    def _expected(self) -> set[str]:
        """The parameters that must get a value from the tensors."""
        modules = dict(self._model.named_modules())
        expected = set()
        for name, parameter in self._model.named_parameters():
            path, _, key = name.rpartition(".")
            # Scales of the KV cache have defaults; the bound of input scales comes from the configuration.
            optional = isinstance(getattr(modules[path], "quant_method", None), BaseKVCacheMethod)
            if parameter.numel() > 0 and not optional and key != "input_scale_ub":
                expected.add(name)
        return expected

    def _missing(self, expected: set[str], loaded: set[str]) -> list[str]:
        """The expected parameters that got none."""
        return sorted(expected - loaded)

    def _is_written(self, place: Holding) -> bool:
        """Whether loading or post-processing has, or may have, written here."""
        value = place.value
        if isinstance(value, torch.Tensor) and not isinstance(place.owner, nn.Module):
            return value is not self._before(place) or value._version != self._versions.get(id(value))
        return isinstance(value, torch.Tensor | float) or value is not self._before(place)

    def _before(self, place: Holding) -> Any:
        return self._stripped.get(id(place.owner), {}).get(place.key)

    def _refuse(self, name: str, place: Holding) -> None:
        """Raises ValueError for what would go on belonging to this model in part."""
        value = place.value
        if isinstance(value, torch.Tensor) and not isinstance(place.owner, nn.Module) and value is self._before(place):
            raise ValueError(f"{name} was written in place by post-processing, and cannot be exchanged")
        if isinstance(value, FunctionType) and any(isinstance(v, nn.Module) for v in _captured(value)):
            raise ValueError(f"{name} is a closure over a layer, and cannot be exchanged")

    def _refuse_containers(self) -> None:
        for path, owner in owners(self._model).items():
            before = self._stripped.get(id(owner), {})
            for key, value in vars(owner).items():
                items = list(value.values()) if isinstance(value, dict) else value
                if key in _TABLES or not isinstance(items, list | tuple) or value is before.get(key):
                    continue
                if any(isinstance(item, torch.Tensor) for item in items):
                    raise ValueError(f"{path}.{key} is a {type(value).__name__} of tensors, and cannot be exchanged")


def _apart(config: VllmConfig) -> VllmConfig:
    """The config with registries of its own: layers register themselves by name, and the live model's are there."""
    apart = copy.copy(config)
    apart.compilation_config = copy.copy(config.compilation_config)
    for registry in ("static_forward_context", "static_all_moe_layers"):
        present = getattr(apart.compilation_config, registry, None)
        if present is not None:
            setattr(apart.compilation_config, registry, type(present)())
    return apart


def _initial(parameter: torch.Tensor) -> torch.Tensor | None:
    """What a new parameter holds, if anybody may need it again: one number if it is constant. None for zeros, and for
    memory that nobody has written to yet."""
    if parameter.is_meta or parameter.numel() == 0:
        return None
    values = parameter.detach().reshape(-1)
    sample = values[:4096].contiguous().view(torch.uint8).view(-1, values.dtype.itemsize)  # bytes: types differ in ==
    if bool((sample == sample[0]).all()):
        return values[0].clone() if bool(sample.any()) else None
    return parameter.detach().clone() if parameter.numel() <= _MAX_KEPT_ELEMENTS else None


def _captured(function: FunctionType) -> list[Any]:
    return list(inspect.getclosurevars(function).nonlocals.values())


def _is_quantised_online(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "quant_method", None), "uses_meta_device", False))


def _constants(attributes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The buffers and the tensors among the attributes of a module."""
    found = {**attributes, **attributes["_buffers"]}
    return {k: v for k, v in found.items() if isinstance(v, torch.Tensor) and not isinstance(v, nn.Parameter)}


def _shallow_copy(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copies the dict and torch's tables in it, not what they hold."""
    return {key: copy.copy(value) if key in _TABLES else value for key, value in attributes.items()}


@contextmanager
def _default_dtype_here(dtype: torch.dtype) -> Iterator[None]:
    """Lets `torch.get_default_dtype` say `dtype` to this thread, as it does while vLLM loads a model: kernels are
    packed for that type. torch's own setting belongs to all threads, so a tensor made without a type still gets that
    one; `Exchange` would refuse it."""
    ask, here = torch.get_default_dtype, threading.get_ident()
    torch.get_default_dtype = lambda: dtype if threading.get_ident() == here else ask()
    try:
        yield
    finally:
        torch.get_default_dtype = ask


def cancellable(tensors: Iterable[tuple[str, torch.Tensor]], cancelled: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, until the event `cancelled` is set: then PrepareCancelledError."""
    for item in tensors:
        if cancelled.is_set():
            raise PrepareCancelledError
        yield item
