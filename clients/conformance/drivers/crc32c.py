"""CRC32C (Castagnoli), as RFC 3720 defines it. Slow: a client for large models takes a library."""

_POLYNOMIAL = 0x82F63B78


def _entry(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = [_entry(value) for value in range(256)]


def crc32c(data: bytes) -> int:
    """The checksum of some bytes."""
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = checksum >> 8 ^ _TABLE[(checksum ^ byte) & 0xFF]
    return checksum ^ 0xFFFFFFFF
