"""The element types of tensors, by safetensors' names: the only table of them."""

from typing import Final

ITEM_BYTES: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
"""Size of an element in bytes."""

SUB_BYTE: Final = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
"""Types of safetensors whose elements are smaller than a byte. A shape does not give their number of bytes, and torch
counts pairs of them or does not have them."""

FRAMEWORK_NAMES: Final = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""Names in torch, numpy and ml_dtypes, which agree."""

SAFETENSORS_NAMES: Final = {name: dtype for dtype, name in FRAMEWORK_NAMES.items()}
"""The reverse table."""


class DtypeError(ValueError):
    """A tensor has a type of unknown size. The message names both."""


def item_bytes(tensor: str, dtype: str) -> int:
    """Size in bytes of an element of this tensor. Raises DtypeError."""
    if dtype not in ITEM_BYTES:
        raise DtypeError(f"{tensor}: {objection(dtype)}")
    return ITEM_BYTES[dtype]


def objection(dtype: str) -> str:
    """Why a type is not in the table."""
    if dtype in SUB_BYTE:
        return f"dtype {dtype} is not supported: its elements are smaller than a byte"
    return f"dtype {dtype[:32]!r} is unknown; known are {', '.join(ITEM_BYTES)}"
