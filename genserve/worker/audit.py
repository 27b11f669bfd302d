"""Finds weights that a push would miss, before the first push.

An exchange replaces what `tree.holdings` sees. A model may keep tensors where that does not look, such as in a
dataclass on a layer: they would stay those of the old version, and the engine would serve a mix of two, with no error
anywhere. So every tensor that the live model can reach has to be accounted for:

- it is exchanged: it is a holding, a parameter or a buffer that somebody refers to a second time, part of a closure
  that is exchanged whole, or, where contents are copied, it looks into the memory of one that is exchanged;
- it is the KV cache;
- no version can change it. It is empty; or it is one of the few tensors that vLLM's steps leave on layers, by name;
  or the model's construction has made it, before anything was loaded: the bare structure that pushes are built in has
  one of the same type in the same place. Loading could still write such a tensor, so `Constants` looks whether it has,
  in that structure, whenever a version is prepared.

Everything else is refused.
"""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from genserve.worker import reach
from genserve.worker.reach import Reached
from genserve.worker.tree import NOT_WEIGHTS, Holding, holdings

_MAX_NAMED = 8

# What steps keep on layers between them, as read in vLLM 0.32: no function of the weights is among them. Steps run in
# inference mode, and loading does not: a tensor of such a name that is none of theirs is refused.
_OF_STEPS = frozenset(
    {
        "_output",  # of shared experts, until the routed ones are done (fused_moe/runner/shared_experts.py)
        "handles",  # of expert-parallel exchanges, by micro-batch (fused_moe/prepare_finalize)
        "deepstack_input_embeds",  # Qwen3-VL: what the vision tower made of the images of this step
        "_pending_mm_embeds",  # Diffusion Gemma: likewise
        "_routed_sel",  # Inkling: the experts of this step
        "_break_outputs",  # DeepSeek V4.1: between the pieces of a CUDA graph
        "_identity_rope",  # Kimi K3: a rotary table of ones and zeros
    }
)


# Permutations that depend on shapes, kept by post-processing for the next layer (quantization/mxfp4.py).
_OF_SHAPES = frozenset({"_cache_permute_indices"})


def audit(live: nn.Module, structure: nn.Module, *, copied: bool, known: "Constants | None" = None) -> "Constants":
    """What loading does not write although `live` can reach it, by its place in `structure`, which is the same model
    without weights. `copied`: an exchange copies contents, and so does not move what is exchanged. `known`: what an
    earlier audit has found; it is the answer if nothing has changed.

    Raises ValueError naming the tensors that are neither exchanged nor constant.
    """
    found = [reached for reached in hidden(live, structure, copied=copied) if not _is_of_a_step(reached)]
    constants = [reached for reached in found if _is_constructed(reached, structure)]
    constructed = {id(reached) for reached in constants}
    paths = sorted({reached.path for reached in found if id(reached) not in constructed})
    if paths:
        raise ValueError(
            f"weights cannot be pushed into this model: a push would leave {', '.join(paths[:_MAX_NAMED])} "
            f"({len(paths)} in all) as loaded at the start, and a mix of two versions would be served"
        )
    if known is not None and known.paths == {reached.path for reached in constants}:
        return known
    return Constants(structure, constants)


def hidden(live: nn.Module, structure: nn.Module | None = None, *, copied: bool) -> Iterator[Reached]:
    """The references to tensors that an exchange does not replace, except for the KV cache and what has no contents.
    Without the bare `structure` every closure counts as one that is exchanged if it is a holding."""
    present = holdings(live)
    built = holdings(structure).keys() if structure is not None else set()
    # What is no tensor changes places whole, if loading has made it; a closure that was there before stays.
    closed = {
        id(place.value)
        for name, place in present.items()
        if not isinstance(place.value, torch.Tensor | float) and (name not in built or not callable(place.value))
    }
    places = {(id(place.owner), place.key) for place in present.values()}
    exchanged = {id(tensor) for tensor in [*live.parameters(), *live.buffers()]}
    memory = _memory_of(present) if copied else set()
    cache = _cache_memory(live)
    for reached in reach.tensors(live, closed=closed, skipped=NOT_WEIGHTS):
        tensor = reached.tensor
        if tensor.is_meta or tensor.numel() == 0 or id(tensor) in exchanged:
            continue
        if (id(reached.owner), reached.steps[-1].key) in places and reached.steps[-1].kind == "attribute":
            if structure is not None and _replaces_a_weight(reached, structure):
                yield reached
            continue
        if (address := _address(tensor)) is None or address not in memory | cache:
            yield reached


class Constants:
    """Tensors of the bare structure that are not exchanged, because construction has made them and nothing writes
    them."""

    def __init__(self, structure: nn.Module, places: Sequence[Reached]) -> None:
        self._structure = structure
        self._contents = [(place, self._content(place)) for place in places]

    @property
    def paths(self) -> frozenset[str]:
        """Where they are."""
        return frozenset(place.path for place, _ in self._contents)

    def within(self, modules: Collection[str]) -> "Constants":
        """Those of these modules alone."""
        part = Constants(self._structure, ())
        part._contents = [(place, before) for place, before in self._contents if place.module in modules]
        return part

    def check(self) -> None:
        """Raises ValueError naming those that preparing a version has written."""
        written = sorted({place.path for place, before in self._contents if self._content(place) != before})
        if written:
            raise ValueError(f"{', '.join(written[:_MAX_NAMED])} was written by loading, and cannot be exchanged")

    def _content(self, place: Reached) -> str:
        tensor = reach.follow(self._structure, place)
        return digest(tensor) if isinstance(tensor, torch.Tensor) else ""


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of the contents."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).hexdigest()


def _replaces_a_weight(reached: Reached, structure: nn.Module) -> bool:
    """Whether a step has put a copy in the place of a reference to a weight: loading makes no such copy, so none is
    exchanged. Attention on the CPU does so with its sinks, for their type."""
    if isinstance(reached.owner, nn.Module) or not reached.tensor.is_inference():
        return False
    return isinstance(reach.follow(structure, reached), nn.Parameter)


def _is_of_a_step(reached: Reached) -> bool:
    if any(step.key in _OF_SHAPES for step in reached.steps) and not reached.tensor.is_floating_point():
        return True
    return reached.tensor.is_inference() and any(step.key in _OF_STEPS for step in reached.steps)


def _is_constructed(reached: Reached, structure: nn.Module) -> bool:
    """Whether construction has made it. A parameter is a weight whoever has made it."""
    bare = reach.follow(structure, reached)
    if not isinstance(bare, torch.Tensor) or isinstance(bare, nn.Parameter) or isinstance(reached.tensor, nn.Parameter):
        return False
    # Scratch memory grows when a step needs more: what steps have made of it may have another shape.
    same_shape = bare.shape == reached.tensor.shape or reached.tensor.is_inference()
    return bool(same_shape and bare.dtype == reached.tensor.dtype)


def _memory_of(present: dict[str, Holding]) -> set[int]:
    """Where the storages of all tensors begin that are exchanged."""
    addresses = (_address(place.value) for place in present.values() if isinstance(place.value, torch.Tensor))
    return {address for address in addresses if address is not None}


def _cache_memory(live: nn.Module) -> set[int]:
    """Where the storages of the KV cache begin: attention keeps views of it."""
    found: set[int] = set()
    for module in live.modules():
        queue: list[Any] = [vars(module).get(key) for key in NOT_WEIGHTS]
        for value in queue:  # grows while it is walked
            if isinstance(value, torch.Tensor):
                found |= {address for address in [_address(value)] if address is not None}
            elif isinstance(value, list | tuple):
                queue.extend(value)
    return found


def _address(tensor: torch.Tensor) -> int | None:
    """Of its storage; None for one that has none of its own, such as a wrapper of other tensors."""
    if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return None
    return tensor.untyped_storage().data_ptr() or None
