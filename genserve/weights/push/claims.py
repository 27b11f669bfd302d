"""Places that another thread or process writes to. None of their bytes counts as received before the claim is
settled."""

from dataclasses import dataclass

from genserve.aio.change import Change


@dataclass(eq=False, slots=True)
class Claim:
    """The right to write [start, end) of an arena through `target`, which keeps the memory until it is settled."""

    start: int
    end: int
    target: memoryview


class Claims:
    """The claims of one push; they do not overlap."""

    def __init__(self) -> None:
        self._claims: set[Claim] = set()
        self._settled = Change()

    def add(self, start: int, end: int, target: memoryview) -> Claim:
        """A new claim. Raises ValueError if it overlaps another one."""
        if self.overlap(start, end):
            raise ValueError(f"[{start}, {end}) is claimed already")
        claim = Claim(start, end, target)
        self._claims.add(claim)
        return claim

    def overlap(self, start: int, end: int) -> bool:
        """Whether somebody writes to a part of [start, end)."""
        return any(claim.start < end and start < claim.end for claim in self._claims)

    def settle(self, claim: Claim) -> None:
        """Ends a claim: nobody writes there any more."""
        self._claims.remove(claim)
        claim.target.release()
        self._settled.tell()

    async def wait_settled(self) -> None:
        """Returns when the next claim is settled."""
        await self._settled.wait()
