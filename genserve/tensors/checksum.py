"""CRC32C of bytes where they lie."""

import google_crc32c
import numpy as np


def crc32c_of(data: bytes | memoryview, before: int = 0) -> int:
    """The checksum, without a copy, of `data` behind bytes whose checksum is `before`."""
    # google_crc32c takes no memoryview, but an array over one.
    return int(google_crc32c.extend(before, data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)))
