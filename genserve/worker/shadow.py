"""A second model beside the live one, without weights between pushes.

Its structure is built once, while nothing is served: building sets torch's default dtype, which is global to the
process and would reach the live model's steps. A push gives it storage, loads and post-processes in a background
thread, takes the finished tensors out, and leaves it bare again.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from genserve.worker.tree import Holding, holdings


class PrepareCancelledError(Exception):
    """The push was given up while it was prepared."""


@dataclass(slots=True)
class _Slot:
    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype


def _apart(config: VllmConfig) -> VllmConfig:
    """The config with registries of its own: layers register themselves by name, and the live model's are there."""
    apart = copy.copy(config)
    apart.compilation_config = copy.copy(config.compilation_config)
    for registry in ("static_forward_context", "static_all_moe_layers"):
        present = getattr(apart.compilation_config, registry, None)
        if present is not None:
            setattr(apart.compilation_config, registry, type(present)())
    return apart


class Shadow:
    """Builds versions of the weights in exactly the form that the live model holds them."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self._config = _apart(config)
        self._device = device
        model_config = config.model_config
        with set_default_torch_dtype(model_config.dtype), device:
            self._model = initialize_model(vllm_config=self._config, model_config=model_config).eval()
        self._slots = [_Slot(p, p.shape, p.dtype) for p in self._model.parameters()]
        self._bare = [(module, _shallow(module)) for module in self._model.modules()]
        self.strip()

    @property
    def num_bytes(self) -> int:
        """Size of the weights, in bytes, before post-processing."""
        return sum(slot.shape.numel() * slot.dtype.itemsize for slot in self._slots)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Holding]:
        """Loads and post-processes a complete version; returns what a live model of that version holds.

        Raises ValueError naming parameters that the tensors left without a value, and whatever the loader raises.
        """
        for slot in self._slots:
            slot.parameter.data = torch.empty(slot.shape, dtype=slot.dtype, device=self._device)
        expected = {name for name, _ in self._model.named_parameters()}
        with torch.no_grad(), set_current_vllm_config(self._config), self._device:
            loaded = self._model.load_weights(tensors)
            if loaded is not None and self._config.model_config.quantization is None:
                missing = sorted(expected - set(loaded))
                if missing:
                    raise ValueError(f"no tensor gave a value to {', '.join(missing[:8])} ({len(missing)} in all)")
            process_weights_after_loading(self._model, self._config.model_config, self._device)
        return holdings(self._model)

    def strip(self) -> None:
        """Takes everything out again: the structure stays, without storage and as it was before post-processing."""
        for module, attributes in self._bare:
            module.__dict__.clear()
            module.__dict__.update(_shallow_copy(attributes))
        for slot in self._slots:
            slot.parameter.data = torch.empty(0, dtype=slot.dtype, device=self._device)


def _shallow(module: nn.Module) -> dict[str, Any]:
    return _shallow_copy(module.__dict__)


def _shallow_copy(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copies the dict and torch's tables in it, not what they hold."""
    return {key: copy.copy(value) if key in _TABLES else value for key, value in attributes.items()}


_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


def cancellable(tensors: Iterable[tuple[str, torch.Tensor]], cancelled: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, until the event `cancelled` is set: then PrepareCancelledError."""
    for item in tensors:
        if cancelled.is_set():
            raise PrepareCancelledError
        yield item
