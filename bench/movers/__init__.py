"""Who moves the bytes of a model into another process, one file for each, behind one protocol."""

from typing import Protocol


class Mover(Protocol):
    """Moves the bytes of a model into another process's buffer."""

    async def move(self) -> float:
        """Moves all of them once; seconds until the receiver has them."""

    async def stop(self) -> None:
        """Frees what it holds."""
