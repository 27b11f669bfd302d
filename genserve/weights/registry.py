"""The pushes that are under way or done: who may open one, and what came of each. (Bodies follow.)"""

import time
from collections.abc import Callable

from genserve.control.state import StateBoard
from genserve.engine.base import Engine
from genserve.weights.checkpoint import CheckpointIndex
from genserve.weights.push import ApplyOptions, PushHeader, PushOutcome
from genserve.weights.update import WeightUpdater


class PushStream:
    """One stream of a push. Call everything on the event loop's thread, and `detach` in any case at the end."""

    push_id: str

    def write(self, offset: int, data: bytes, crc32c: int | None) -> None:
        """Stages a chunk."""
        raise NotImplementedError

    async def finish(self) -> PushOutcome:
        """PushEnd has arrived: the outcome, the same for all streams of the push."""
        raise NotImplementedError

    def detach(self) -> None:
        """The stream is over, cut or not; staged bytes stay until their time to live ends. Idempotent."""
        raise NotImplementedError

    async def wait_expired(self) -> None:
        """Returns when no byte came for the push's time to live: end the stream, `write` and `finish` would raise."""
        raise NotImplementedError


class PushRegistry:
    """Every push of the daemon."""

    def __init__(
        self,
        checkpoint: CheckpointIndex | None,
        engine: Engine,
        updater: WeightUpdater,
        board: StateBoard,
        *,
        max_staging_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        raise NotImplementedError

    def check_num_tensors(self, num_tensors: int) -> None:
        """Raises ManifestMismatchError for more tensors than can be right; ask before converting a manifest."""
        raise NotImplementedError

    async def open(self, header: PushHeader) -> PushStream:
        """Opens a push, or joins one."""
        raise NotImplementedError

    def report(self, push_id: str) -> PushOutcome:
        """How far a push has come. Raises PushNotFoundError."""
        raise NotImplementedError

    async def commit(self, push_id: str, apply: ApplyOptions) -> PushOutcome:
        """Applies a staged push. Raises PushNotFoundError, PushTruncatedError, ..."""
        raise NotImplementedError

    def discard(self, push_id: str) -> PushOutcome:
        """Frees what a push has staged. Raises PushNotFoundError, ApplyInProgressError."""
        raise NotImplementedError

    async def run(self) -> None:
        """Frees staged bytes whose time to live is over. Never returns."""
        raise NotImplementedError

    async def close(self) -> None:
        """Waits for a push that is being applied, ends all others and frees their bytes."""
        raise NotImplementedError
