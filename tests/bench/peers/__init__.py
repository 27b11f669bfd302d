"""Who generates, one file for each, behind one protocol."""

from pathlib import Path
from typing import ClassVar, Protocol

from tests.bench.traces import Trace, Work


class GenerationServer(Protocol):
    """An engine and what serves it. `peers` are the ways to ask it, `pid` the process above all of its own."""

    peers: ClassVar[tuple[str, ...]]
    pid: int

    async def start(self, checkpoint: Path, directory: Path) -> None:
        """Starts it, with `directory` for its log; raises PeerError."""

    async def generate(self, peer: str, work: Work) -> list[Trace]:
        """Makes the requests in one of the ways."""

    async def stop(self) -> None:
        """Ends it."""
