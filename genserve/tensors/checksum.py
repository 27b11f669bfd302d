"""CRC32C of bytes where they lie, computed by google_crc32c, which is loaded when it is needed: clients do without."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def crc32c_of(data: bytes | memoryview, before: int = 0) -> int:
    """The checksum of `data` behind bytes whose checksum is `before`. Copies nothing where numpy is installed. Raises
    ImportError without google_crc32c."""
    return _extend()(before, data)


def is_fast() -> bool:
    """Whether google_crc32c is installed and computes in C. In Python it takes minutes per GB."""
    try:
        return bool(import_module("google_crc32c").implementation == "c")
    except ImportError:
        return False


@cache
def _extend() -> Callable[[int, bytes | memoryview], int]:
    extend: Callable[[int, Any], int] = import_module("google_crc32c").extend
    try:
        as_array = import_module("numpy").frombuffer
    except ImportError:
        return lambda before, data: extend(before, bytes(data))
    # The function accepts bytes but no memoryview; an array over the memoryview works.
    return lambda before, data: extend(before, data if isinstance(data, bytes) else as_array(data, "uint8"))
