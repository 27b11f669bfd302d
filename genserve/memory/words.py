"""64-bit words that processes share without locks: each word has one writer at a time, and any number of readers.

The words are in anonymous memory: a child inherits its descriptor, and it is freed with the last process that has it,
however that process ends.
"""

import mmap
import os
import weakref
from typing import Self

WORD_BYTES = 8


class SharedWords:
    """Words by their index. `ints` are signed integers and `floats` the same memory as floating-point numbers: an
    aligned word is written and read as a whole."""

    def __init__(self, fd: int) -> None:
        """Maps the words of an inherited descriptor, which is closed with this object. The words themselves stay for as
        long as anybody has a view of them."""
        self.fd = fd
        self._closing = weakref.finalize(self, os.close, fd)
        memory = memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
        self.ints = memory.cast("q")
        self.floats = memory.cast("d")

    @classmethod
    def create(cls, count: int, name: str) -> Self:
        """Makes `count` words, all 0."""
        fd = os.memfd_create(f"genserve-{name}")
        os.ftruncate(fd, count * WORD_BYTES)
        return cls(fd)

    def __len__(self) -> int:
        """The number of words."""
        return len(self.ints)

    def close(self) -> None:
        """Closes the descriptor. May be called again."""
        self._closing()
