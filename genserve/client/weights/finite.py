"""Looks for NaN and infinity in weights before they are sent.

The client looks, and not the daemon: torch looks at a tensor where it lies, for a trainer on a GPU at the speed of the
GPU's memory, and nothing of a diverged version is sent, staged or prepared anywhere.
"""

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Final

from genserve.client.weights.sources import TensorSource
from genserve.errors import InvalidFieldError

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


def check_finite(sources: Sequence[TensorSource]) -> None:
    """Reads all tensors once; in a thread, because it takes seconds. Raises ValueError naming the first tensor with NaN
    or infinity, and InvalidFieldError if neither torch nor numpy is there to look at bytes."""
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
