"""CRC32C of bytes where they lie, computed by google_crc32c, which is loaded when it is needed: clients do without."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def crc32c_of(data: bytes | memoryview, before: int = 0) -> int:
    """The checksum of `data` behind bytes whose checksum is `before`. Copies nothing where numpy is installed. Raises
    ImportError without google_crc32c."""
    extend, as_bytes = _loaded()
    return extend(before, data if isinstance(data, bytes) else as_bytes(data, "uint8"))


def is_fast() -> bool:
    """Whether google_crc32c is installed and computes in C. In Python it takes minutes per GB."""
    try:
        return bool(import_module("google_crc32c").implementation == "c")
    except ImportError:
        return False


@cache
def _loaded() -> tuple[Callable[[int, Any], int], Callable[[Any, str], Any]]:
    """The function that computes, and what makes something of a memoryview that it accepts: an array over it, or a
    copy."""
    extend: Callable[[int, Any], int] = import_module("google_crc32c").extend
    try:
        return extend, import_module("numpy").frombuffer
    except ImportError:
        return extend, lambda data, dtype: bytes(data)
