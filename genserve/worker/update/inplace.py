"""Loads a new version over the live one, layer by layer, if a device has no memory for a second model.

It does not use vLLM's layerwise reload, which puts the live layers back into their loading form: a failure leaves
half-built layers behind, missing tensors are served from uninitialised memory, and on the CPU a tied head keeps its old
packed weight even after a success (tests/engine/test_vllm_trap.py). Here the live model never takes another form: each
layer is built beside it, in the structure that `Shadow` keeps without storage, and exchanged when it is complete. This
needs memory for the largest layer.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from threading import Event
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import VllmConfig
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from genserve.worker.model.audit import Constants, audit
from genserve.worker.model.digests import Digesting
from genserve.worker.model.tree import Holding, holdings, owners
from genserve.worker.update.device import Device
from genserve.worker.update.exchange import ContentExchange, PointerExchange, exchange
from genserve.worker.update.plan.recorder import memory_of
from genserve.worker.update.protocol import Reserving
from genserve.worker.update.shadow import Cancellable, Shadow
from genserve.worker.update.structure import Structure

Tensors = Iterable[tuple[str, torch.Tensor]]
Layer = int | None
"""A layer: everything with the same first number in its name. None is everything without a number: embeddings, final
norm and head."""


class InPlaceUpdate:
    """Loads complete versions over the live one, inside the pause, after a rehearsal without errors.

    A commit that fails leaves layers of two versions live, and nothing else behind: the next version that is prepared
    and committed, such as the previous one, is exact.
    """

    can_roll_back = False

    def __init__(self, live: nn.Module, config: VllmConfig, device: Device) -> None:
        """Builds the structure, and reserves the device memory for the largest layer. Call it while nothing is served,
        as for `Shadow`. `device` is the live model's. Raises torch.OutOfMemoryError."""
        self._live = live
        self._loaded = frozenset(holdings(live))
        self._device = device
        # On the CPU, where memory that nobody writes to costs nothing: on the device there is no room.
        whole = Structure.build(live, config, torch.device("cpu"))
        self._model = whole.model
        with device.work():
            self._layers = layer_shadows(whole, device)
            self._elsewhere = LayerShadow(whole, [], [], device)  # for tensors of layers that the model leaves out
        self.reserve_memory()
        self._tensors: list[tuple[str, torch.Tensor]] | None = None
        self._began = False
        self._constants: Constants | None = None

    def audit(self) -> Constants:
        """Returns the constants. Raises ValueError naming weights of the live model that an exchange would miss."""
        known, copied = self._constants, self._device.keeps_addresses
        constants = audit(self._live, self._model, copied=copied, known=known, loaded=self._loaded)
        self._constants = constants
        if constants is not known:
            for shadow in self._layers.values():
                shadow.constants = constants.within(shadow.modules)
        return constants

    def prepare(self, tensors: Tensors, cancelled: Event) -> None:
        """Rehearses a version: does all but the exchange, and keeps none of it but the tensors; may run in a background
        thread while the live version serves. The memory behind the tensors must stay until `discard`.

        Raises what is wrong with the version: ValueError naming the parameters that it leaves without a value, or what
        differs from the live model, and whatever the loader and post-processing raise; and PrepareCancelledError soon
        after `cancelled` is set.
        """
        self.discard()
        tensors = list(Cancellable(tensors, cancelled))  # may take minutes, in which steps leave values on the layers
        self.audit()
        for shadow, part, live in self._steps(tensors):
            self._exchange(shadow, Cancellable(part, cancelled), live)
        self._tensors = tensors

    def commit(self) -> None:
        """Puts the version in place. Only while nothing is scheduled. If this raises, the live weights are unknown."""
        if self._tensors is None:
            raise RuntimeError("nothing is prepared")
        steps = self._steps(self._tensors)
        self._began = True
        with self._device.work():
            for shadow, part, live in steps:
                # Its memory is free before the next layer needs it.
                self._exchange(shadow, part, live, in_pause=True).overwrite()

    def rollback(self) -> None:
        """Raises RuntimeError if a commit has begun: the replaced weights are gone, and a version must be prepared and
        committed."""
        if self._began:
            raise RuntimeError("the weights that an update in place replaced are gone")

    def release_memory(self) -> None:
        """Forgets the prepared version and frees the reserved device memory, while nothing is served."""
        self.discard()
        self._device.release_memory()

    def reserve_memory(self, along: Reserving = nullcontext) -> None:
        """Reserves the memory again, with `along` for each layer. Raises torch.OutOfMemoryError; then the next version
        looks for memory when it is prepared."""
        with self._device.work():
            for layer in self._layers.values():
                with layer.reserved(), along():
                    pass

    def discard(self) -> None:
        """Forgets the prepared version."""
        self._tensors, self._began = None, False

    def draft_digests(self) -> Digesting:
        """None: what drafts has an update of its own."""
        yield from ()
        return {}

    def _steps(self, tensors: Tensors) -> list[tuple[Shadow, Tensors, dict[str, Holding]]]:
        parts = by_layer(tensors)
        live = by_layer(holdings(self._live).items())
        layers = sorted(self._layers.keys() | parts.keys(), key=lambda number: (number is None, number))
        # Checkpoints may have layers that the model omits: its loader knows them.
        return [(self._layers.get(layer, self._elsewhere), parts[layer], dict(live[layer])) for layer in layers]

    def _exchange(
        self, shadow: Shadow, tensors: Tensors, live: dict[str, Holding], *, in_pause: bool = False
    ) -> PointerExchange | ContentExchange:
        try:
            prepared = shadow.load(tensors, in_pause=in_pause)
            return exchange(live, prepared, self._device, untouched=shadow.untouched)
        finally:
            shadow.strip()


class LayerShadow(Shadow):
    """Builds one layer of a version: a shadow of a model that has no other layer."""

    def __init__(
        self,
        whole: Structure,
        modules: Sequence[tuple[str, nn.Module]],
        members: Sequence[Any],
        device: Device,
        around: Sequence[Any] = (),
    ) -> None:
        """`modules` of the layer, by their names; `members`: those modules, and the objects that hang on them;
        `around`: those that are in no layer."""
        model = LayerModel(whole.model, modules)
        structure = whole.layer(model, members, device.device)
        if whole.model_config.quantization is None:
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            model.must_fill = [(names[id(slot.parameter)], slot.parameter) for slot in structure.slots]
        # Not "is one of its own": post-processing makes parts that were not there before.
        self._of_others = {id(owner) for owner in owners(whole.model).values()} - {id(member) for member in members}
        super().__init__(structure, device.device, device.loading, around)

    @property
    def modules(self) -> frozenset[str]:
        """Names of the modules of this layer."""
        return frozenset(name for name, _ in self._model.named_modules())

    def written(self) -> dict[str, Holding]:
        """As for any shadow. If several layers share a value, it belongs to the first one, as in the live model."""
        written = super().written()
        return {name: place for name, place in written.items() if id(place.owner) not in self._of_others}


def layer_shadows(whole: Structure, device: Device) -> dict[Layer, LayerShadow]:
    """A shadow for each layer of a structure; their storage is on `device`. Raises ValueError for a model that vLLM
    does not post-process layer by layer."""
    if hasattr(whole.model, "process_weights_after_loading"):
        raise ValueError(f"{type(whole.model).__name__} is post-processed as a whole, not layer by layer")
    members = by_layer(owners(whole.model).items())
    around = [owner for _, owner in members[None]]
    return {
        layer: LayerShadow(whole, modules, [owner for _, owner in members[layer]], device, around)
        for layer, modules in by_layer(whole.model.named_modules()).items()
    }


class LayerModel(nn.Module):
    """The model that vLLM sees when it loads and post-processes a layer: it contains only the modules of this layer."""

    def __init__(self, whole: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._whole = [whole]  # in a list, so that it is not a child module
        self._layer = modules
        self.must_fill: list[tuple[str, nn.Parameter]] = []

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules of the layer, by the names that they have in the whole model."""
        return iter(self._layer)

    def get_submodule(self, target: str) -> nn.Module:
        """Any module of the whole model."""
        return self._whole[0].get_submodule(target)

    def load_weights(self, tensors: Tensors) -> Any:
        """Loads the tensors into the whole model. Raises ValueError naming parameters without a complete value."""
        with _Writes() as writes, disable_mtp_completeness_check():
            loaded = self._whole[0].load_weights(tensors)
        missing = [name for name, parameter in self.must_fill if not writes.fill(parameter)]
        if missing:
            raise ValueError(f"no tensor gave a complete value to {', '.join(missing[:8])} ({len(missing)} in all)")
        return loaded


class _Writes(TorchDispatchMode):
    """Counts which elements of tensors are written. Loaders assemble parameters from parts (q, k and v in one), and
    report a parameter as loaded after one part. So elements count here: each region that was copied to or filled,
    once."""

    _WRITING = frozenset({torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default})

    def __init__(self) -> None:
        super().__init__()
        self._regions: defaultdict[int, set[Any]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._WRITING:
            target = args[0]
            region = (target.storage_offset(), target.shape, target.stride())
            self._regions[memory_of(target)].add(region)
        return func(*args, **(kwargs or {}))

    def fill(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter was written completely."""
        regions = self._regions[memory_of(parameter)]
        return bool(sum(shape.numel() for _, shape, _ in regions) >= parameter.numel())


def by_layer(named: Iterable[tuple[str, Any]]) -> defaultdict[Layer, list[tuple[str, Any]]]:
    """Pairs of a name and something, by layer."""
    found: defaultdict[Layer, list[tuple[str, Any]]] = defaultdict(list)
    for name, thing in named:
        numbers = (int(part) for part in name.split(".") if part.isdigit())
        found[next(numbers, None)].append((name, thing))
    return found
