"""What the trainers of the push model are: launches that mean one content, and the streams that bring it."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from genserve.weights.push.stream import PushStream
from genserve.weights.push.types import PushAction, PushHeader, PushOutcome
from tests.unit.weights.conftest import MANIFEST, header, weights

NUM_RANKS = 2
PART = MANIFEST.total_bytes // NUM_RANKS
TTL_S = 100.0
# A rank that resumes sends what GetPush says is missing, one that presumes sends the end alone.
FATES = ("ends", "resumes", "presumes", "breaks", "is missing")
ACTIONS = (PushAction.APPLY, PushAction.APPLY, PushAction.STAGE, PushAction.PREPARE)

T = TypeVar("T")


def content(parts: Sequence[int]) -> bytes:
    """Of each rank a part, by its number."""
    return b"".join(weights(part)[rank * PART : (rank + 1) * PART] for rank, part in enumerate(parts))


def pick(things: Sequence[T], number: int) -> T:
    """One of them, by a number that was drawn without looking at them: a history is the same when it is run again."""
    return things[number % len(things)]


async def in_loop(act: "Callable[[Sender], None]", sender: "Sender") -> None:
    """Does something to a stream while the loop runs."""
    act(sender)


@dataclass(eq=False)
class Launch:
    """A start of a trainer that pushes one version."""

    push_id: str
    version: int
    attempt: str
    data: bytes
    action: PushAction
    num_streams: int

    def header(self) -> PushHeader:
        """That of each of its streams."""
        return header(
            self.push_id,
            self.version,
            action=self.action,
            num_streams=self.num_streams,
            attempt=self.attempt,
            staging_ttl_s=TTL_S,
            prepared_ttl_s=TTL_S / 2,
        )


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
