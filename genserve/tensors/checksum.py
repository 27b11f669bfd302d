"""CRC32C of bytes, without copying them."""

import google_crc32c
import numpy as np


def crc32c_of(data: bytes | memoryview, before: int = 0) -> int:
    """The checksum of `data`, without a copy, after bytes with the checksum `before`."""
    # google_crc32c accepts no memoryview, but an array over one.
    return int(google_crc32c.extend(before, data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)))
