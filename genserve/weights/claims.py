"""Places that somebody else than the event loop writes to. Not a byte of them counts as there before it is settled."""

import asyncio
import os
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Claim:
    """The right to write [start, end) of an arena through `fd`, which is closed when it is settled."""

    start: int
    end: int
    fd: int


class Claims:
    """The claims of one push; they do not overlap."""

    def __init__(self) -> None:
        self._claims: set[Claim] = set()
        self._settled = asyncio.Event()

    def add(self, start: int, end: int, fd: int) -> Claim:
        """A new one; `fd` belongs to it. Raises ValueError where there is one already."""
        if self.overlap(start, end):
            raise ValueError(f"[{start}, {end}) is claimed already")
        claim = Claim(start, end, fd)
        self._claims.add(claim)
        return claim

    def overlap(self, start: int, end: int) -> bool:
        """Whether somebody writes to a part of [start, end)."""
        return any(claim.start < end and start < claim.end for claim in self._claims)

    def settle(self, claim: Claim) -> None:
        """Nobody writes there any more."""
        self._claims.remove(claim)
        os.close(claim.fd)
        self._settled.set()
        self._settled = asyncio.Event()

    async def wait_settled(self) -> None:
        """Returns when the next claim is settled."""
        await self._settled.wait()
