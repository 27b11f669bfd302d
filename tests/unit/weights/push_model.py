"""What the trainers of the push model are: launches that mean one content, and the streams that bring it."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from genserve.weights.push.stream import PushStream
from genserve.weights.push.types import PushAction, PushOutcome
from tests.unit.weights.conftest import MANIFEST, weights

NUM_RANKS = 2
PART = MANIFEST.total_bytes // NUM_RANKS


def content(parts: Sequence[int]) -> bytes:
    """Of each rank a part, by its number."""
    return b"".join(weights(part)[rank * PART : (rank + 1) * PART] for rank, part in enumerate(parts))


@dataclass(eq=False)
class Launch:
    """A start of a trainer that pushes one version."""

    push_id: str
    version: int
    attempt: str
    data: bytes
    action: PushAction
    num_streams: int


@dataclass(eq=False)
class Sender:
    """A stream of a launch's rank. `sent` are the offsets of its chunks; `takes_part`: it does not only ask what
    became of the push."""

    launch: Launch
    rank: int
    stream: PushStream
    takes_part: bool
    sent: set[int] = field(default_factory=set)
    finishing: "asyncio.Task[PushOutcome] | None" = None

    @property
    def offsets(self) -> range:
        return range(self.rank * PART, (self.rank + 1) * PART, 4)


class Inline(ThreadPoolExecutor):
    """Does at once what would be done in a thread, so that histories do not depend on the time that it takes."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **options))
        except BaseException as error:
            done.set_exception(error)
        return done
