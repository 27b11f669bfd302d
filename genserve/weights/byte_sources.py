"""Where the bytes of a version are: in an arena, or elsewhere."""

from typing import Protocol

from genserve.memory.arena import Arena

CHANGED = "are unknown, because the checkpoint's files have changed since the daemon started"


class ByteSource(Protocol):
    """The source of the bytes of a manifest's byte space. `held_bytes`: memory that is used only for them. Readers
    raise ValueError once it is closed, and NotResidentError if the bytes are not those of the version any more."""

    held_bytes: int

    def check(self) -> None:
        """Raises NotResidentError as a read would."""

    def view(self, start: int, end: int) -> memoryview:
        """The bytes [start, end), without a copy if they are in memory."""

    def read_into(self, start: int, target: memoryview) -> None:
        """Copies the bytes from `start` on, until `target` is full."""

    def close(self) -> None:
        """Frees the memory. Safe to call more than once."""


class ArenaBytes:
    """The bytes of an arena."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.held_bytes = arena.size_bytes

    def check(self) -> None:
        """Does nothing: nobody else writes there."""

    def view(self, start: int, end: int) -> memoryview:
        """The bytes [start, end), not copied."""
        return self.arena.view(start, end - start)

    def read_into(self, start: int, target: memoryview) -> None:
        """A memcpy; releases the GIL."""
        if target:
            import numpy as np  # a router imports this module and has no numpy

            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(self.view(start, start + len(target)), np.uint8))

    def close(self) -> None:
        """Frees the memory."""
        self.arena.close()
