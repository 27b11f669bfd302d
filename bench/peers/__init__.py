"""Who generates, one file for each, behind one protocol."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import ClassVar, Protocol

from bench.traces import Trace, Work


class GenerationServer(Protocol):
    """An engine and what serves it. `peers` are the ways to ask it, of which some give no text; `pid` is the process
    above all of its own, `is_own_client` whether the requests are made in there."""

    peers: ClassVar[tuple[str, ...]]
    without_text: ClassVar[tuple[str, ...]]
    is_own_client: ClassVar[bool]
    pid: int

    async def start(self, checkpoint: Path, directory: Path, stack: AsyncExitStack, flags: Sequence[str] = ()) -> None:
        """Starts it, with further flags of its engine and `directory` for its log; `stack` ends it, also when this
        raises PeerError."""

    async def generate(self, peer: str, work: Work) -> list[Trace]:
        """Makes the requests in one of the ways."""
