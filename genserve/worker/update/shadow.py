"""Builds versions of the weights in a second model beside the live one.

The structure of this model is built once, while nothing is served. A push gives it storage, loads and post-processes in
a background thread, takes the finished tensors out, and leaves the structure without storage again. `exchange`
exchanges the tensors with the live ones.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event
from types import FunctionType
from typing import Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_processing,
    initialize_online_processing,
)
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from genserve.worker.model.audit import Constants
from genserve.worker.model.tree import MODULE_TABLES, Holding, holdings, owners
from genserve.worker.update.plan.loading import PlannedLoading
from genserve.worker.update.protocol import PrepareCancelledError
from genserve.worker.update.structure import Attributes, Structure

_MAX_NAMED = 8


class Shadow:
    """Builds versions of the weights in exactly the form that the live model holds them."""

    def __init__(
        self,
        structure: Structure,
        place: torch.device,
        copying: Callable[[], AbstractContextManager[object]],
        around: Iterable[Any] = (),
    ) -> None:
        """`place`: where versions are built: the live model's device, or the CPU; `copying`: a context in which this
        thread copies a checkpoint's tensors there (`Device.loading`); `around`: objects that are not of the structure,
        and that the loader may change."""
        self._structure = structure
        self._model = structure.model
        self._place = place
        self._copying = copying
        self._loading = PlannedLoading(structure, place, around)
        self._bare: dict[int, Attributes] = {}  # attributes as `strip` left them, by id of the module or part
        self._counters: dict[int, int] = {}  # torch's write counters of the parts' tensors then, by id of the tensor
        self.constants: Constants | None = None
        """The tensors that loading must not write; None until a live model was audited."""
        self.untouched: frozenset[str] = frozenset()
        """Names of what the last load found, and did not write."""
        self.strip()

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """What a version takes is allocated within the block: a GPU keeps that memory for pushes. A CPU does not."""
        if self._place.type == "cpu":
            yield
            return
        try:
            self._structure.allocate(self._place)
            yield
        finally:
            self.strip()

    @property
    def model(self) -> nn.Module:
        """The model that versions are built in: without weights, between pushes."""
        return self._model

    @property
    def num_bytes(self) -> int:
        """Size of the weights, in bytes, before post-processing."""
        return self._structure.num_bytes

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], *, in_pause: bool = False) -> dict[str, Holding]:
        """Loads and post-processes a complete version, and returns the holdings of a live model with it. `in_pause`:
        requests wait for it. It may iterate over the tensors twice.

        Raises ValueError naming parameters without a value, or what post-processing wrote where it cannot be exchanged,
        and the loader's errors.
        """
        self._structure.allocate(self._place)
        model_config = self._structure.model_config
        with self._as_vllm_loads():
            online = [module for module in self._model.modules() if _is_quantised_online(module)]
            with self._place:
                for module in online:
                    initialize_online_processing(module)  # vLLM does this when it builds a layer, for one load
            expected = self._expected()
            with self._copying():
                load = self._model.load_weights if online else partial(self._loading.load, in_pause=in_pause)
                loaded = load(tensors)
            missing = self._missing(expected, set(expected if loaded is None else loaded))
            if missing:
                raise ValueError(f"no tensor gave a value to {', '.join(missing[:_MAX_NAMED])} ({len(missing)} in all)")
            if online:
                finalize_layerwise_processing(self._model, model_config)
            process_weights_after_loading(self._model, model_config, self._place)
        return self.written()

    def written(self) -> dict[str, Holding]:
        """The holdings that loading and post-processing may have written. Raises ValueError for a value that cannot be
        exchanged."""
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
        """Removes everything again: the structure stays, without storage and as it was before post-processing."""
        self._structure.strip(self._place)
        modules, parts = self._structure.modules, self._structure.parts
        self._bare = {id(owner): dict(vars(owner)) for owner, _ in [*modules, *parts]}
        self._counters = {
            id(value): value._version
            for part, _ in parts
            for value in vars(part).values()
            if isinstance(value, torch.Tensor)
        }

    @contextmanager
    def _as_vllm_loads(self) -> Iterator[None]:
        """The context in which vLLM loads and post-processes weights, for this thread only. The model's device is
        not the default device here: vLLM leaves that context before it loads. So what post-processing makes without
        naming a device, such as copies of scales for attention, is in the host's memory."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(set_current_vllm_config(self._structure.config))
            stack.enter_context(default_dtype_here(self._structure.model_config.dtype))
            yield

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
        """The expected parameters without a value."""
        return sorted(expected - loaded)

    def _is_written(self, place: Holding) -> bool:
        """Whether loading or post-processing may have written here."""
        value = place.value
        if isinstance(value, torch.Tensor) and not isinstance(place.owner, nn.Module):
            return value is not self._before(place) or value._version != self._counters.get(id(value))
        return isinstance(value, torch.Tensor | float) or value is not self._before(place)

    def _before(self, place: Holding) -> Any:
        return self._bare.get(id(place.owner), {}).get(place.key)

    def _refuse(self, name: str, place: Holding) -> None:
        """Raises ValueError for a value that would still belong to this model in part."""
        value = place.value
        if isinstance(value, torch.Tensor) and not isinstance(place.owner, nn.Module) and value is self._before(place):
            raise ValueError(f"{name} was written in place by post-processing, and cannot be exchanged")
        if isinstance(value, FunctionType) and any(isinstance(v, nn.Module) for v in _captured(value)):
            raise ValueError(f"{name} is a closure over a layer, and cannot be exchanged")

    def _refuse_containers(self) -> None:
        for path, owner in owners(self._model).items():
            before = self._bare.get(id(owner), {})
            for key, value in vars(owner).items():
                items = list(value.values()) if isinstance(value, dict) else value
                if key in MODULE_TABLES or not isinstance(items, list | tuple) or value is before.get(key):
                    continue
                if any(isinstance(item, torch.Tensor) for item in items):
                    raise ValueError(f"{path}.{key} is a {type(value).__name__} of tensors, and cannot be exchanged")


@dataclass(frozen=True, slots=True)
class Cancellable:
    """Tensors, as often as they are iterated, until the event `cancelled` is set: then it raises
    PrepareCancelledError."""

    tensors: Iterable[tuple[str, torch.Tensor]]
    cancelled: Event

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for item in self.tensors:
            if self.cancelled.is_set():
                raise PrepareCancelledError
            yield item


def _captured(function: FunctionType) -> list[Any]:
    return list(inspect.getclosurevars(function).nonlocals.values())


def _is_quantised_online(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "quant_method", None), "uses_meta_device", False))


@contextmanager
def default_dtype_here(dtype: torch.dtype) -> Iterator[None]:
    """Lets `torch.get_default_dtype` say `dtype` to this thread, as it does while vLLM loads a model: kernels are
    packed for that type. torch's own setting belongs to all threads, so a tensor made without a type still gets that
    one; the exchange would refuse it. torch's compiler gets torch's own setting: when it has compiled something, it
    sets what it found, for all threads."""
    ask, here = torch.get_default_dtype, threading.get_ident()

    def asked() -> torch.dtype:
        if threading.get_ident() != here or _is_of_compiler(sys._getframe(1).f_globals["__name__"]):
            return ask()
        return dtype

    torch.get_default_dtype = asked
    try:
        yield
    finally:
        torch.get_default_dtype = ask


def _is_of_compiler(module: str) -> bool:
    return module.startswith("torch._dynamo.")
