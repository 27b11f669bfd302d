"""A new version over the live one, layer by layer, where a device has no room for a second model.

Not on top of vLLM's layerwise reload, which gives the live layers their loading form back: what fails leaves half-built
layers behind, what a version lacks is served from uninitialised memory, and on the CPU a tied head keeps its old packed
weight even when all goes well (tests/engine/test_vllm_trap.py). Here the live model never takes another form: each
layer is built beside it, in the structure that `Shadow` keeps without storage, and exchanged when it is whole. That
takes room for the largest layer; for two of them where addresses are captured.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from genserve.worker.exchange import Exchange
from genserve.worker.shadow import Shadow
from genserve.worker.tree import Holding, holdings

Tensors = Iterable[tuple[str, torch.Tensor]]
Layer = int | None
"""All that has the same first number in its name; None is what has no number: embeddings, final norm and head."""


class InPlaceUpdate:
    """Loads complete versions over the live one, inside the pause.

    A failure leaves layers of two versions live, and nothing else behind: the next complete version, such as the
    previous one, is loaded exactly.
    """

    def __init__(self, live: nn.Module, config: VllmConfig, device: torch.device, *, addresses_captured: bool) -> None:
        """Builds the structure; while nothing is served, as for `Shadow`. `device` is the live model's."""
        self._live = live
        self._addresses_captured = addresses_captured
        self._shadow = LayerShadow(config, device)

    def rehearse(self, tensors: Tensors) -> None:
        """Does all that `commit` does but the exchange; may run in a background thread while the live version serves.

        Raises what `commit` would raise: ValueError naming the parameters that the version leaves without a value, or
        what differs from the live model, and whatever the loader and post-processing raise.
        """
        live = _by_layer(holdings(self._live).items())
        for layer, part in self._parts(tensors):
            self._build(layer, part, live)

    def commit(self, tensors: Tensors) -> None:
        """Puts a complete version in place; only while nothing is scheduled, and not beside `rehearse`.

        Raises what `rehearse` raises, and whatever goes wrong in the exchange. The live weights are unknown then.
        """
        live = _by_layer(holdings(self._live).items())
        for layer, part in self._parts(tensors):
            self._build(layer, part, live).commit()  # and what was replaced is freed before the next one needs room

    def _build(self, layer: Layer, tensors: Tensors, live: dict[Layer, list[tuple[str, Holding]]]) -> Exchange:
        try:
            prepared = self._shadow.load_layer(layer, tensors)
            return Exchange(dict(live[layer]), prepared, addresses_captured=self._addresses_captured)
        finally:
            self._shadow.strip()

    def _parts(self, tensors: Tensors) -> list[tuple[Layer, list[tuple[str, torch.Tensor]]]]:
        """Every layer of the model, and of the version, with its tensors. Takes all of them first: a source that fails
        does so before anything has changed."""
        parts = _by_layer(tensors)
        layers = self._shadow.layers | parts.keys()
        return [(layer, parts[layer]) for layer in sorted(layers, key=lambda x: (x is None, x))]


class LayerShadow(Shadow):
    """A shadow of which one layer at a time has storage."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        # Built on the host, where memory that nobody writes to costs nothing: on the device there is no room.
        super().__init__(config, torch.device("cpu"))
        self._device = device
        if hasattr(self._model, "process_weights_after_loading"):
            raise ValueError(f"{type(self._model).__name__} is post-processed as a whole, not layer by layer")
        for _, attributes in self._bare:
            buffers = attributes["_buffers"]
            buffers.update({key: buffer.to(device) for key, buffer in buffers.items() if buffer is not None})
        self.strip()
        names = [name for name, _ in self._model.named_parameters()]
        self._slots_by_layer = _by_layer(zip(names, self._slots, strict=True))
        self._modules_by_layer = _by_layer(self._model.named_modules())

    @property
    def layers(self) -> set[Layer]:
        """The layers that have parameters."""
        return set(self._slots_by_layer)

    def load_layer(self, layer: Layer, tensors: Tensors) -> dict[str, Holding]:
        """Loads and post-processes one layer; returns what a live model of that version holds there, until `strip`."""
        slots = self._slots_by_layer[layer]
        for _, slot in slots:
            slot.parameter.data = torch.empty(slot.shape, dtype=slot.dtype, device=self._device)
        with torch.no_grad(), set_current_vllm_config(self._config), self._device:
            with _Writes() as writes, disable_mtp_completeness_check():
                self._model.load_weights(tensors)
            if self._config.model_config.quantization is None:
                missing = [name for name, slot in slots if not writes.fill(slot.parameter)]
                if missing:
                    raise ValueError(
                        f"no tensor gave a value to all of {', '.join(missing[:8])} ({len(missing)} in all)"
                    )
            with self._nothing_but(layer):
                process_weights_after_loading(self._model, self._config.model_config, self._device)
        return dict(_by_layer(holdings(self._model).items())[layer])

    @contextmanager
    def _nothing_but(self, layer: Layer) -> Iterator[None]:
        """Where vLLM walks through the model's modules to post-process them, it finds those of this layer alone."""
        modules = self._modules_by_layer[layer]
        vars(self._model)["named_modules"] = lambda: iter(modules)
        try:
            yield
        finally:
            del vars(self._model)["named_modules"]


class _Writes(TorchDispatchMode):
    """Sees which elements of tensors are written.

    Loaders put parameters together from parts (q, k and v in one), and report one as loaded when a part has come. So
    elements count here: each region that was copied to or filled, once.
    """

    _WRITING = frozenset({torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default})

    def __init__(self) -> None:
        super().__init__()
        self._regions: defaultdict[int, set[Any]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._WRITING:
            target = args[0]
            region = (target.storage_offset(), target.shape, target.stride())
            self._regions[target.untyped_storage()._cdata].add(region)
        return func(*args, **(kwargs or {}))

    def fill(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter was written from end to end."""
        regions = self._regions[parameter.untyped_storage()._cdata]
        return bool(sum(shape.numel() for _, shape, _ in regions) >= parameter.numel())


def _by_layer(named: Iterable[tuple[str, Any]]) -> defaultdict[Layer, list[tuple[str, Any]]]:
    """Pairs of a name and something, by layer."""
    found: defaultdict[Layer, list[tuple[str, Any]]] = defaultdict(list)
    for name, thing in named:
        numbers = (int(part) for part in name.split(".") if part.isdigit())
        found[next(numbers, None)].append((name, thing))
    return found
