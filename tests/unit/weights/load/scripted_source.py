"""Sources that bring what a test says."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from genserve.tensors.manifest import Manifest
from genserve.tensors.ranges import Range
from genserve.weights.load.loader import WeightLoader
from genserve.weights.load.types import Load, Offer, Peers, SourceError, SourceSilentError, WeightSource
from genserve.weights.push.stream import PushStream
from tests.support.patience import slow
from tests.unit.weights.conftest import MANIFEST, Rig, weights


@dataclass
class ScriptedSource:
    """Has the bytes of `version`, and sends at most `sends_bytes` of those that are asked for. `before` and `after` are
    called when it is asked, and when it has sent them; if it `is_silent` no end follows these; `opens_s` is how long it
    takes to answer."""

    name: str = "one"
    version: int = 1
    weight_version: int = 1
    identity: str = ""
    origin: str = ""
    content_digest: str = ""
    manifest: Manifest = MANIFEST
    sends_bytes: int = 1 << 20
    fails: bool = False
    is_silent: bool = False
    opens_s: float = 0.0
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    asked: list[tuple[Range, ...] | None] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, missing: tuple[Range, ...] | None, weight_version: int) -> AsyncIterator[Offer]:
        self.asked.append(missing)
        self.before()
        await slow(self.opens_s)
        if self.fails:
            raise SourceError("it is gone")
        if weight_version not in (0, self.weight_version):
            raise SourceError(f"it has version {self.weight_version}")
        yield self

    async def send(self, stream: PushStream) -> None:
        data, left = weights(self.version), self.sends_bytes
        missing = self.asked[-1]
        for start, end in ((0, len(data)),) if missing is None else missing:
            end = min(end, start + left)
            stream.write(start, data[start:end], None)
            left -= end - start
        self.after()
        if self.is_silent:
            raise SourceSilentError("it is silent")
        if left == 0:
            raise SourceError("it broke off")


def loader(rig: Rig, *sources: WeightSource) -> WeightLoader:
    """Of peers that are these."""
    by_name = {source.name: source for source in sources}
    return WeightLoader(rig.registry, lambda address, push_id: by_name[address])


def load_of(*sources: WeightSource, **fields: object) -> Load:
    """Push p1 from these."""
    return replace(Load(Peers(tuple(source.name for source in sources)), "p1"), **fields)  # type: ignore[arg-type]
