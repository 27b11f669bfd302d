"""Makes a list of `TensorSource` from anything that holds weights: names, types, shapes and a way to get the bytes. And
looks for NaN and infinity in them.

Neither torch nor numpy is imported to read a tensor: a caller that passes one has imported it, so `sys.modules` has it.
bfloat16 and float8 need neither numpy nor ml_dtypes, because the bytes are read directly from torch's memory.
"""

import ctypes
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from genserve.client.weights.modules import MAX_PIECES, Cut, Share, is_module, module_tensors, shared_out
from genserve.errors import InvalidFieldError
from genserve.tensors.dtypes import FRAMEWORK_NAMES, SAFETENSORS_NAMES, item_bytes
from genserve.tensors.safetensors import StoredTensor, read_checkpoint
from genserve.transport.fields import naming

Rename = Mapping[str, str] | Callable[[str], str]
"""From a trainer's name to the checkpoint's. A mapping keeps names that it does not have."""

_NOT_FINITE: Final = {
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
    "F8_E8M0": ("u1", 0xFF),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "C64": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}
"""For each type that has values that are not finite: numpy's type for the bits of a number, and the bits that are all
set in those values and in no other."""
_NAN_BITS: Final = {"F8_E4M3FNUZ": 0x80, "F8_E5M2FNUZ": 0x80}
"""Types with one such value, by its bits."""
_AT_ONCE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor that can be sent.

    `read` returns this rank's bytes, row-major and little-endian. It may copy (from a GPU, or to make them contiguous)
    and is called in a worker thread, one tensor at a time, so that at most one copy exists.
    """

    name: str
    dtype: str
    """safetensors' name of the type."""
    shape: tuple[int, ...]
    read: Callable[[], memoryview]
    share: Share | None = None
    """The part that is sent from here, if several ranks share the tensor; None = all of it."""
    copies: bool = True
    """Whether `read` may copy. Otherwise it takes no time and needs no thread."""
    tensor: Any = None
    """The torch tensor that `read` reads, on its device; None of what is not torch's."""

    @property
    def size_bytes(self) -> int:
        """Number of its bytes, on all ranks together. Raises DtypeError."""
        return math.prod(self.shape) * item_bytes(self.name, self.dtype)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The bytes [start, end) that are sent from here, in order."""
        return ((0, self.size_bytes),) if self.share is None else self.share.ranges


def tensor_sources(
    weights: Any, *, tied_once: bool = True, rename: Rename | None = None, is_whole: bool = True
) -> list[TensorSource]:
    """The tensors of `weights`, under the names that `rename` gives them. `is_whole`: these are all tensors of the
    push, so a mapping must have one of them.

    `weights` is a mapping of names to torch tensors or numpy arrays, a torch module (`modules.module_tensors`), the
    path of a .safetensors file or of a checkpoint directory, or what was pulled (`PulledWeights.tensors`). Of torch
    tensors that are the same memory (tied weights) the first is taken, as in checkpoints, unless `tied_once` is False.
    Of a DTensor each rank has its share; of whatever lies beside DTensors and is none, every rank has the same, and the
    first one sends it. The bytes are read while they are sent: do not train on them meanwhile.

    Raises TypeError for anything else and for types that safetensors has no name for; CheckpointFileError or OSError
    for files; ValueError for a DTensor whose share cannot be sent as it lies (`dtensor.shared_out`), or only in too
    many pieces, and for a module with an adapter that is not merged; InvalidFieldError for `rename`.
    """
    sources = _sources(weights, tied_once=tied_once)
    if rename is None:
        return sources
    with naming("rename"):
        return _all_renamed(sources, rename, is_whole=is_whole)


def _all_renamed(sources: Sequence[TensorSource], rename: Rename, *, is_whole: bool) -> list[TensorSource]:
    """Raises TypeError if `rename` returns no name, and ValueError if a mapping has none of the names, or if several
    tensors get the same one."""
    names = {each.name: _renamed(each.name, rename) for each in sources}
    if is_whole and isinstance(rename, Mapping) and rename and names and not rename.keys() & names.keys():
        raise ValueError(
            f"renames {next(iter(rename))!r}, which no tensor is called: they are called as {next(iter(names))!r} is; "
            "pass a function to change a part of each name"
        )
    origins: dict[str, str] = {}
    for name, renamed in names.items():
        if (other := origins.setdefault(renamed, name)) != name:
            raise ValueError(f"gives {renamed!r} to several tensors, such as {other!r} and {name!r}")
    return [replace(each, name=names[each.name]) for each in sources]


def _renamed(name: str, rename: Rename) -> str:
    """Raises TypeError for what gives no name."""
    if not isinstance(rename, Mapping) and not callable(rename):
        raise TypeError(f"must be a mapping or a function, not {type(rename).__name__}")
    renamed = rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
    if not isinstance(renamed, str):
        raise TypeError(f"gives a {type(renamed).__name__} for {name}, not a name")
    return renamed


def _sources(weights: Any, *, tied_once: bool) -> list[TensorSource]:
    if isinstance(weights, str | os.PathLike):
        stored = read_checkpoint(Path(weights))
        return [
            TensorSource(each.name, each.dtype, each.shape, partial(_identity, each.data), copies=False)
            for each in stored
        ]
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if is_module(weights):
        weights = module_tensors(weights, _torch_identity if tied_once else lambda _: None)
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a mapping of tensors, a torch module or a path, not {type(weights).__name__}")

    sources = []
    seen: set[tuple[object, ...]] = set()
    for name, tensor in weights.items():
        if isinstance(tensor, Cut):
            sources.append(_torch_source(name, tensor))
        elif isinstance(tensor, StoredTensor):
            sources.append(
                TensorSource(name, tensor.dtype, tensor.shape, partial(_identity, tensor.data), copies=False)
            )
        elif torch is not None and isinstance(tensor, torch.Tensor):
            identity = _torch_identity(tensor)
            if tied_once and identity is not None and identity in seen:
                continue
            seen.add(identity or (name,))
            sources.append(_torch_source(name, tensor))
        elif numpy is not None and isinstance(tensor, numpy.ndarray):
            dtype = _dtype_of(name, tensor.dtype.name)
            copies = not tensor.flags.c_contiguous or not tensor.dtype.isnative
            sources.append(TensorSource(name, dtype, tuple(tensor.shape), partial(_read_numpy, tensor), copies=copies))
        else:
            raise TypeError(f"{name}: {type(tensor).__name__} is neither a torch tensor nor a numpy array")
    return _shared_out(sources)


def num_ranks(sources: Sequence[TensorSource]) -> int:
    """The number of ranks that hold the tensors together; 1 without DTensors. Raises ValueError if the tensors are on
    different ranks: then only the caller knows how many push."""
    ranks = {source.share.ranks for source in sources if source.share is not None}
    if len(ranks) > 1:
        raise ValueError("the DTensors are on device meshes of different ranks: pass the number of `callers` that push")
    return len(ranks.pop()) if ranks else 1


def _shared_out(sources: list[TensorSource]) -> list[TensorSource]:
    """Adds a share to every tensor, if any tensor has one."""
    first = next((source.share for source in sources if source.share is not None), None)
    if first is None:
        return sources
    most = max(sources, key=lambda source: len(source.ranges))
    if sum(len(source.ranges) for source in sources) - len(sources) > MAX_PIECES:
        num_pieces, (start, end) = len(most.ranges), most.ranges[0]
        raise ValueError(
            f"{most.name}: what this rank has of it lies in {num_pieces} pieces of {end - start} bytes, all tensors "
            f"together in more than {MAX_PIECES}; redistribute it to Shard(0) on every rank first"
        )
    return [each if each.share else replace(each, share=first.of_plain(each.size_bytes)) for each in sources]


def to_torch(stored: StoredTensor) -> Any:
    """A torch tensor over the same memory, or over a copy if the bytes are not aligned for their type. Raises
    DtypeError."""
    torch = import_module("torch")  # only pulling torch tensors needs torch here
    item_bytes(stored.name, stored.dtype)
    dtype = getattr(torch, FRAMEWORK_NAMES[stored.dtype])
    if len(stored.data) == 0:
        return torch.empty(stored.shape, dtype=dtype)
    elements = torch.frombuffer(stored.data, dtype=torch.uint8)
    if elements.data_ptr() % dtype.itemsize:
        elements = elements.clone()
    return elements.view(dtype).view(stored.shape)


def _identity(data: memoryview) -> memoryview:
    return data


def _dtype_of(name: str, dtype: str) -> str:
    if dtype not in SAFETENSORS_NAMES:
        raise TypeError(f"{name}: no dtype of a push matches {dtype}")
    return SAFETENSORS_NAMES[dtype]


def _torch_identity(tensor: Any) -> tuple[object, ...] | None:
    """An identity that is equal for tensors with the same bytes in the same order; None for what has no bytes, or is no
    tensor."""
    if not isinstance(tensor, sys.modules["torch"].Tensor):
        return None
    if _is_sharded(tensor):
        return None
    if tensor.is_meta or tensor.is_sparse or tensor.numel() == 0:
        return None
    if hasattr(tensor, "full_tensor"):
        # Uses the storage, not the address: all ranks must agree, and a rank without rows has no address.
        local = tensor.detach().to_local()
        storage = local.untyped_storage()._cdata
        return (storage, local.storage_offset(), local.stride(), tensor.dtype, tuple(tensor.shape), tensor.placements)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _is_sharded(tensor: Any) -> bool:
    """Whether it is a ShardedTensor, which raises when it is asked for most other attributes of a tensor."""
    return hasattr(tensor, "local_shards")


def _torch_source(name: str, tensor: Any) -> TensorSource:
    if _is_sharded(tensor):
        raise TypeError(f"{name}: a ShardedTensor; give FSDP a device_mesh, or use fully_shard, to have DTensors")
    is_shard = isinstance(tensor, Cut) or hasattr(tensor, "full_tensor")
    local, share = shared_out(name, tensor) if is_shard else (tensor.detach(), None)
    if local.is_meta or local.layout != sys.modules["torch"].strided:
        raise TypeError(f"{name}: a {'meta' if local.is_meta else local.layout} tensor has no bytes to send")
    dtype = _dtype_of(name, str(tensor.dtype).removeprefix("torch."))
    copies = local.device.type != "cpu" or not local.is_contiguous() or local.is_conj() or local.is_neg()
    return TensorSource(name, dtype, tuple(tensor.shape), partial(_read_torch, local), share, copies, local)


def _read_torch(tensor: Any) -> memoryview:
    """The tensor's memory, or that of a contiguous copy on the CPU, as bytes; the view keeps it alive."""
    contiguous = tensor.cpu().contiguous().resolve_conj().resolve_neg()
    size_bytes = contiguous.numel() * contiguous.element_size()
    if size_bytes == 0:
        return memoryview(b"")
    memory = (ctypes.c_char * size_bytes).from_address(contiguous.data_ptr())
    memory.owner = contiguous
    return memoryview(memory).cast("B")


def _read_numpy(array: Any) -> memoryview:
    """The array's memory, or that of a contiguous little-endian copy, as bytes."""
    little_endian = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    # Through uint8, because ml_dtypes' types have no buffer format; reshaped first, because a scalar has no view.
    return memoryview(little_endian.reshape(-1).view("uint8"))


def check_finite(sources: Sequence[TensorSource]) -> None:
    """Reads all tensors once; in a thread, because it takes seconds. Raises ValueError naming the first tensor with NaN
    or infinity, and InvalidFieldError if neither torch nor numpy is there to look at bytes.

    The client looks, and not the daemon: torch looks at a tensor where it lies, for a trainer on a GPU at the speed of
    the GPU's memory, and nothing of a diverged version is sent, staged or prepared anywhere.
    """
    for source in sources:
        finite = _is_finite(source.tensor) if source.tensor is not None else _has_finite_bytes(source)
        if not finite:
            raise ValueError(f"{source.name}: has NaN or infinity, which finite=True refuses: nothing was sent")


def _is_finite(tensor: Any) -> bool:
    """Of a torch tensor. The smallest and the largest value are enough: NaN is both, if there is one."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.is_complex():
        tensor = sys.modules["torch"].view_as_real(tensor.resolve_conj())
    elif tensor.element_size() == 1:
        tensor = tensor.float()
    smallest, largest = tensor.detach().aminmax()
    return bool((smallest.isfinite() & largest.isfinite()).item())


def _has_finite_bytes(source: TensorSource) -> bool:
    nan = _NAN_BITS.get(source.dtype)
    if source.dtype not in _NOT_FINITE and nan is None:
        return True
    kind, bits = _NOT_FINITE.get(source.dtype, ("u1", 0))
    for values in _pieces(source, kind):
        found = values == nan if nan is not None else (values & bits) == bits
        if found.any():
            return False
    return True


def _pieces(source: TensorSource, kind: str) -> Iterator[Any]:
    try:
        numpy = import_module("numpy")
    except ImportError:
        raise InvalidFieldError.of("finite", "needs numpy for tensors that are not torch's") from None
    data = source.read()
    for start in range(0, len(data), _AT_ONCE_BYTES):
        yield numpy.frombuffer(data[start : start + _AT_ONCE_BYTES], dtype=kind)
