"""The tensors of a torch module under the names of its checkpoint: without what wraps the module, without adapters that
are merged into its weights, and in the form in which transformers saves it; and which bytes of a tensor this rank
sends, if several ranks of a trainer hold it together.

Wrappers, adapters and DTensors are recognised by what they hold, so neither they nor torch are imported. Nothing here
merges or communicates. transformers has a mapping for each class of models, by which it loads checkpoints, and its
reverse, by which `save_pretrained` saves them: other names, and one tensor for each expert of a layer where the model
has one for all. A model of it has imported it.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from operator import mul
from typing import Any, Final

from genserve.tensors.inserted_names import BASE_LAYER, PARALLEL, PEFT_PREFIX, WRAPPED

MAX_PIECES: Final = 8192
"""The limit of pieces that one rank sends of a push. Each piece is a frame, and until its neighbours arrive, a hole in
the daemon's ranges, which are limited to some ten thousand."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a tensor that one of several ranks sends."""

    ranges: tuple[tuple[int, int], ...]
    """Bytes [start, end) of the whole tensor, in order; empty if another rank sends the same bytes."""
    ranks: tuple[int, ...]
    """All ranks that have a share, in order, as torch.distributed numbers them."""
    rank: int
    """This rank."""

    def of_plain(self, size_bytes: int) -> "Share":
        """The share of a tensor that all of these ranks hold completely: the first rank sends it."""
        return Share(((0, size_bytes),) if self.rank == self.ranks[0] else (), self.ranks, self.rank)


@dataclass(frozen=True, slots=True)
class Cut:
    """A block of a DTensor that is a tensor of its own, such as one expert of those of a layer.

    `starts` and `lengths` are those of the block, for each dimension of the DTensor; `dims` are the dimensions that the
    block keeps, in its own order. The others have length 1.
    """

    tensor: Any
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def of_view(cls, tensor: Any, whole: Any, view: Any) -> "Cut | None":
        """What `view` is of `whole`, a contiguous tensor like the DTensor; None if it is no block."""
        strides, shape, rest = whole.stride(), whole.shape, view.storage_offset()
        starts = []
        for stride in strides:
            starts.append(rest // stride)
            rest %= stride
        lengths, dims = [1] * len(shape), list[int]()
        for size, stride in zip(view.shape, view.stride(), strict=True):
            fits = (d for d in range(len(shape)) if (strides[d], d in dims) == (stride, False))
            dim = next((d for d in fits if starts[d] + size <= shape[d]), None)
            if dim is None:
                return None
            dims.append(dim)
            lengths[dim] = size
        return cls(tensor, tuple(starts), tuple(lengths), tuple(dims))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the block."""
        return tuple(self.lengths[dim] for dim in self.dims)

    @property
    def dtype(self) -> Any:
        """torch's type of its elements."""
        return self.tensor.dtype


def shared_out(name: str, tensor: Any) -> tuple[Any, Share]:
    """This rank's part of a DTensor, or of what is cut out of one, as a plain tensor, and its share. Both have the same
    bytes.

    If several ranks hold the same part (Replicate), the first of them has the share. Raises ValueError if the part is
    not a block of the tensor: pending sums (Partial), and blocks of blocks.
    """
    whole = tensor.tensor if isinstance(tensor, Cut) else tensor
    mesh, placements = whole.device_mesh, whole.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"{name}: {placements} is a pending sum; redistribute it on every rank first")
    ranks, local = tuple(sorted(mesh.mesh.flatten().tolist())), whole.detach().to_local()
    coordinate = mesh.get_coordinate()
    sends = coordinate is not None and not any(
        position for position, placement in zip(coordinate, placements, strict=True) if placement.is_replicate()
    )
    if not sends or local.numel() == 0:
        return local, Share((), ranks, mesh.get_rank())
    chunks = whole.__create_chunk_list__()  # as torch.distributed.checkpoint finds the place of each chunk
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise ValueError(f"{name}: what {placements} leaves here is no block; redistribute it on every rank first")
    offsets, sizes = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
    if isinstance(tensor, Cut):
        local, offsets, sizes = _common(tensor, local, offsets)
    if local.numel() == 0:
        return local, Share((), ranks, mesh.get_rank())
    ranges = block_ranges(tuple(tensor.shape), offsets, sizes, local.element_size())
    return local, Share(tuple(ranges), ranks, mesh.get_rank())


def _common(cut: Cut, local: Any, offsets: Sequence[int]) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """What a cut and this rank's block at `offsets` have in common: the elements, and their place in the cut."""
    begins = [max(pair) for pair in zip(cut.starts, offsets, strict=True)]
    for dim, (start, length) in enumerate(zip(cut.starts, cut.lengths, strict=True)):
        end = min(start + length, offsets[dim] + local.shape[dim])
        if end <= begins[dim]:
            return local.new_empty(0), (), ()
        local = local.narrow(dim, begins[dim] - offsets[dim], end - begins[dim])
        offsets = (*offsets[:dim], begins[dim], *offsets[dim + 1 :])
    dropped = [dim for dim in range(len(cut.starts)) if dim not in cut.dims]
    local = local.permute(*cut.dims, *dropped)[(..., *(0 for _ in dropped))]
    return local, tuple(begins[dim] - cut.starts[dim] for dim in cut.dims), tuple(local.shape)


def block_ranges(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], item_bytes: int
) -> Iterator[tuple[int, int]]:
    """The place of the block of `sizes` at `offsets` in a row-major tensor of `shape`: ranges of bytes of equal length,
    in order, as few as possible. No size is 0."""
    cut = max((dim for dim, size in enumerate(sizes) if size != shape[dim]), default=None)
    if cut is None:
        yield 0, item_bytes * math.prod(shape)
        return
    strides = [item_bytes * math.prod(shape[dim + 1 :]) for dim in range(cut + 1)]
    length = sizes[cut] * strides[cut]
    outer = (range(offset, offset + size) for offset, size in zip(offsets[:cut], sizes[:cut], strict=True))
    for index in product(*outer):
        start = sum(map(mul, (*index, offsets[cut]), strides))
        yield start, start + length


def as_saved(model: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tensors as `save_pretrained` would save them, if this is a model of transformers: views of the same memory
    wherever the conversion cuts, turns or renames.

    Raises ValueError for a DTensor whose part on this rank cannot be told from what the conversion makes of it, because
    nothing communicates here.
    """
    modeling, loading = (sys.modules.get(f"transformers.{name}") for name in ("modeling_utils", "core_model_loading"))
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return tensors
    ignored = frozenset(model._keys_to_ignore_on_save or ())
    kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    if loading is None:  # transformers 4 has the form of checkpoints in memory, too
        return kept
    if not any(hasattr(tensor, "full_tensor") for tensor in kept.values()):
        return _reverted(loading, model, kept)
    return _of_dtensors(loading, model, kept)


def _reverted(loading: Any, model: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    overrides = import_module("torch.overrides")

    class Views(overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        """Leaves out copies that only make a tensor contiguous: it becomes so when it is sent, one at a time. Otherwise
        all experts of a model would be copied at once."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is import_module("torch").Tensor.contiguous:
                return args[0]
            return func(*args, **(kwargs or {}))

    with Views():
        found: Mapping[str, Any] = loading.revert_weight_conversion(model, dict(tensors))
    return found


def _of_dtensors(loading: Any, model: Any, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Converts tensors without memory instead, and finds out what each of the results is of those that were put in."""
    torch = import_module("torch")
    meta = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}
    sources = {each.untyped_storage()._cdata: name for name, each in meta.items()}
    found: dict[str, Any] = {}
    for name, view in _reverted(loading, model, meta).items():
        source = sources.get(view.untyped_storage()._cdata, "")
        if source and (view.shape, view.stride()) == (meta[source].shape, meta[source].stride()):
            found[name] = tensors[source]
            continue
        cut = Cut.of_view(tensors[source], meta[source], view) if source else None
        if cut is None or not hasattr(cut.tensor, "full_tensor"):
            raise ValueError(
                f"{name}: transformers makes it of several tensors, some of them DTensors, or turns their elements: "
                "gather them by full_tensor(), and push what the module without DTensors has"
            )
        found[name] = cut
    return found


def module_tensors(module: Any, same: Callable[[Any], object]) -> Mapping[str, Any]:
    """The tensors that the module computes with, by the names of its checkpoint.

    Of tensors for which `same` gives the same result other than None, the first one is taken. Raises ValueError for an
    adapter that is not merged into the weights.
    """
    outer, inner = _unwrapped(module)
    layers = dict(_adapted(module))
    tensors: dict[str, Any] = {}
    seen: set[object] = set()
    for raw, tensor in module.state_dict().items():
        name = _placed(raw, layers)
        identity = None if name is None else same(tensor)
        if name is None or (identity is not None and identity in seen):
            continue
        seen.add(identity)
        tensors[name.removeprefix(outer)] = tensor
    return as_saved(inner, tensors)


def is_module(weights: Any) -> bool:
    """Whether it is a torch module."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(weights, torch.nn.Module)


def _unwrapped(module: Any) -> tuple[str, Any]:
    """What stands before each name because of what wraps the module as a whole, apart from WRAPPED; and the module
    inside."""
    outer = ""
    while True:
        children = dict(module.named_children())
        wrapped = next(iter(children.keys() & WRAPPED), None)
        base: Any = children.get("base_model")
        if wrapped is not None:
            module = children[wrapped]
        elif children.keys() == {PARALLEL} and not any(True for _ in module.named_parameters(recurse=False)):
            outer, module = f"{outer}{PARALLEL}.", children[PARALLEL]  # data parallel: DDP, DeepSpeed
        elif hasattr(module, "peft_config") and hasattr(base, "peft_config") and hasattr(base, "model"):
            outer, module = f"{outer}{PEFT_PREFIX}", base.model
        else:
            return outer, module


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A layer that PEFT has put in the place of one of the model. `used`: what it computes with, as its names begin;
    `is_merged`: whether nothing else of it is needed."""

    used: tuple[str, ...]
    is_merged: bool


def _adapted(module: Any) -> Iterator[tuple[str, _Adapted]]:
    """Layers of PEFT, by their names without WRAPPED."""
    for name, layer in module.named_modules():
        children = dict(layer.named_children())
        path = ".".join(part for part in name.split(".") if part not in WRAPPED)
        if BASE_LAYER in children and hasattr(layer, "merged"):
            yield path, _Adapted((BASE_LAYER,), bool(layer.merged))
        elif "token_adapter" in children:  # PEFT's trainable_token_indices
            yield path, _Adapted(("token_adapter",), is_merged=True)
        elif {"original_module", "modules_to_save"} <= children.keys():
            active = getattr(layer, "active_adapter", None)
            active = next(iter(active), None) if isinstance(active, list) else active
            trained = active in children["modules_to_save"] and not getattr(layer, "disable_adapters", False)
            yield path, _Adapted(("modules_to_save", str(active)) if trained else ("original_module",), is_merged=True)


def _placed(raw: str, layers: Mapping[str, _Adapted]) -> str | None:
    """The name without WRAPPED and PEFT's layers; None for a tensor that the model does not use."""
    parts = [part for part in raw.split(".") if part not in WRAPPED]
    kept: list[str] = []
    position = 0
    while position < len(parts):
        layer = layers.get(".".join(parts[:position]))
        if layer is None:
            kept.append(parts[position])
            position += 1
        elif tuple(parts[position : position + len(layer.used)]) == layer.used:
            position += len(layer.used)
        elif layer.is_merged:
            return None
        else:
            raise ValueError(
                f"{raw}: an adapter that is not merged into the weights: push it with push_lora, or merge it first, "
                "with PEFT's merge_adapter()"
            )
    return ".".join(kept)
