"""Protobuf's variable-length integers, for frames that are read and written without its classes."""


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at `position` and where it ends. Raises IndexError at the end of the data, ValueError for one that is
    longer than a number below 2^63 needs to be; protobuf cuts those to size."""
    number = 0
    for shift in range(0, 63, 7):
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise ValueError("a long number")


def to_varint(number: int) -> bytes:
    """The bytes of a number that is not negative."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
