"""torch's own operators of CUDA tensors, computed on the host: the kernels below them do nothing in the fake runtime.

torch calls `install` when it is imported, as an entry point of the group torch.backends says. Only operators of
torch that the CPU has as well are replaced: kernels of vLLM, of Triton and of compiled graphs still do nothing.

Copies from and to the host are the runtime's. Copies within the device become copies of rows in the current stream, and
are done as late as any other. What computes, computes at once, after what its stream has before it; the runtime
checks that no other stream uses the same memory.
"""

import ctypes
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

_REGION = range(0x100000000000, 0x108000000000)
"""Addresses of devices, as in fake.h: the others are of pinned memory."""
_SHADOW_OFFSET = 0x100000000000
_DEVICE_TO_DEVICE = 3
_KEPT = ("empty", "set_", "resize_", "record_stream", "copy_", "_pin_memory", "is_pinned")
"""Beginnings of names of operators that do not compute."""

_libraries: list[Any] = []  # an operator is replaced for as long as its library lives


def install() -> None:
    """Replaces the operators, if this process has the fake runtime."""
    try:
        use = ctypes.CDLL("libcudart.so.13").fake_cuda_use
    except (OSError, AttributeError):
        return
    use.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
    for qualified in torch._C._dispatch_get_all_op_names():
        name = qualified.removeprefix("aten::")
        if name == qualified or name.startswith(_KEPT) or not _is_of_both(qualified):
            continue
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if not _is_view(operator):
            library.impl(name, _OnHost(operator, use), "CUDA", with_keyset=True, allow_override=True)
    library.impl("copy_", _copying(_OnHost(torch.ops.aten.copy_.default, use)), "CUDA", with_keyset=True)


def _is_of_both(name: str) -> bool:
    return all(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("CPU", "CUDA"))


def _is_view(operator: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in operator._schema.returns)


class _OnHost:
    """An operator of CUDA tensors, computed by the CPU's. Indices that a kernel should have written may be out of
    range: then it calls `own`, torch's own operator, which does nothing here."""

    def __init__(self, operator: Any, use: Callable[..., Any]) -> None:
        self.own = torch.library.get_kernel(operator.name(), "CUDA")
        self._operator = operator
        self._use = use
        written = [each.alias_info is not None and each.alias_info.is_write for each in operator._schema.arguments]
        self._written = written
        self._names = [each.name for each in operator._schema.arguments]
        self._tensors = [str(each.type) == "Tensor" for each in operator._schema.arguments]

    def __call__(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        # torch passes numbers in place of tensors that it has made of them.
        args = tuple(_tensor(each) if is_one else each for each, is_one in zip(args, self._tensors, strict=False))
        tensors = [each for each in _tensors([args, kwargs]) if each.is_cuda]
        device = tensors[0].device if tensors else torch.device("cuda", torch.cuda.current_device())
        stream = torch.cuda.current_stream(device)
        outputs = self._outputs(args, kwargs)
        for each in tensors:
            is_written = any(each is output for output in outputs)
            self._use(
                stream.cuda_stream, each.untyped_storage().data_ptr(), each.untyped_storage().nbytes(), is_written
            )
        hosts: dict[int, torch.Tensor] = {}

        def to_host(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_cuda:
                return hosts.setdefault(id(value), on_host(value))
            if isinstance(value, torch.device) and value.type == "cuda":
                return torch.device("cpu")
            return None if isinstance(value, torch.Generator) else value

        try:
            result = self._operator(*tree_map(to_host, args), **tree_map(to_host, kwargs))
        except IndexError:
            return self.own.call_boxed(keys, *args, **kwargs)
        for output in outputs:
            host = hosts.get(id(output))
            if host is not None and host.shape != output.shape:
                output.resize_(host.shape)
                output.copy_(host)
        if outputs and self._operator._schema.returns:
            given = iter(outputs)
            returned = [next(given) if each.alias_info is not None else None for each in self._operator._schema.returns]
            results = result if isinstance(result, tuple) else (result,)
            placed = tuple(
                own if own is not None else _on_device(each, device)
                for own, each in zip(returned, results, strict=True)
            )
            return placed if isinstance(result, tuple) else placed[0]
        return tree_map(lambda each: _on_device(each, device), result)

    def _outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors that it writes, in the order of its arguments."""
        found: list[torch.Tensor] = []
        for number, (name, is_written) in enumerate(zip(self._names, self._written, strict=True)):
            if is_written:
                found += _tensors(args[number] if number < len(args) else kwargs.get(name))
        return found


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory of the fake device, as a tensor of the host."""
    size = tensor.untyped_storage().nbytes()
    if size == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    at = tensor.untyped_storage().data_ptr()
    if at in _REGION:
        at += _SHADOW_OFFSET
    memory = (ctypes.c_uint8 * size).from_address(at)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    alias = torch.empty(0, dtype=tensor.dtype).set_(
        whole.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    return torch._conj(alias) if tensor.is_conj() else alias


def _on_device(value: Any, device: torch.device) -> Any:
    """What an operator has made, in memory of the device."""
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return made.copy_(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors within lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [each for item in value for each in _tensors(item)] if isinstance(value, list | tuple) else []


def _tensor(value: Any) -> Any:
    """A number as a tensor."""
    return torch.tensor(value) if isinstance(value, bool | int | float | complex) else value


def _copying(convert: _OnHost) -> Callable[..., Any]:
    """`copy_` for CUDA tensors; `convert` between types."""
    rows_of = ctypes.CDLL("libcudart.so.13").cudaMemcpy2DAsync
    rows_of.argtypes = [ctypes.c_void_p, ctypes.c_size_t] * 2 + [ctypes.c_size_t] * 2 + [ctypes.c_int, ctypes.c_void_p]

    def copy_(keys: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        source = _tensor(source)
        is_inside = target.device == source.device and target.is_cuda
        if not is_inside or (target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype):
            return convert.own.call_boxed(keys, target, source, non_blocking)
        if target.dtype != source.dtype or target.is_conj() or source.is_conj():
            return convert(keys, target, source, non_blocking)
        stream = torch.cuda.current_stream(target.device).cuda_stream
        for to, to_pitch, at, from_pitch, width, height in _rows(target, source.expand_as(target)):
            if rows_of(to, to_pitch, at, from_pitch, width, height, _DEVICE_TO_DEVICE, stream) != 0:
                raise RuntimeError("the fake runtime refuses a copy within the device")
        return target

    return copy_


def _rows(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[int, int, int, int, int, int]]:
    """A copy, as copies of rows: the innermost dimension that is dense in both is a row, the next one counts rows."""
    size = target.element_size()
    dims = [
        (count, to * size, at * size)
        for count, to, at in zip(target.shape, target.stride(), source.stride(), strict=True)
        if count != 1
    ]
    if target.numel() == 0:
        return
    width = size
    while dims and dims[-1][1] == width and dims[-1][2] == width:
        width *= dims.pop()[0]
    height, to_pitch, from_pitch = dims.pop() if dims else (1, width, width)
    counts = [each[0] for each in dims]
    for number in range(math.prod(counts)):
        to, at = target.data_ptr(), source.data_ptr()
        for count, to_stride, from_stride in reversed(dims):
            number, index = divmod(number, count)
            to += index * to_stride
            at += index * from_stride
        yield to, to_pitch, at, from_pitch, width, height
