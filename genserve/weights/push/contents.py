"""The digest of a push's contents, computed while its bytes arrive."""

import asyncio
import os
from collections.abc import Sequence
from typing import Final

from genserve.change import Change
from genserve.tensors.content import content_digest, tensor_digest
from genserve.tensors.manifest import TensorSpec
from genserve.weights.push.staging import Staging

_AT_ONCE_BYTES: Final = 64 << 20
"""Small tensors are hashed together: a turn of a thread costs more than their bytes."""
_MAX_THREADS: Final = 8
_CORES_PER_THREAD: Final = 4
"""The others are the engine's, and those of the streams that bring the bytes."""


class Contents:
    """Hashes each tensor, in threads, as soon as its bytes are there: they do not change any more, whatever attempt has
    brought them. `arrived` is told whenever some have arrived."""

    def __init__(self, staging: Staging, arrived: Change) -> None:
        self._staging = staging
        self._arrived = arrived
        self._task: asyncio.Task[str] | None = None

    def begin(self) -> "asyncio.Task[str]":
        """Begins with what is there, unless it has begun. Its result is the digest, once every byte is there."""
        task = self._task
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._task = asyncio.create_task(self._hash(), name="digest of a push's contents")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def end(self) -> None:
        """Stops: the bytes are about to be freed."""
        if self._task is not None:
            self._task.cancel()

    async def _hash(self) -> str:
        waiting = sorted(self._staging.manifest.tensors, key=lambda tensor: tensor.offset + tensor.length, reverse=True)
        digests: list[tuple[TensorSpec, str]] = []
        running: set[asyncio.Task[list[tuple[TensorSpec, str]]]] = set()
        most = _num_threads()
        try:
            while waiting or running:
                arrived = self._arrived.next
                while len(running) < most and (there := self._there(waiting)):
                    running.add(asyncio.create_task(asyncio.to_thread(self._hashed, there)))
                if running:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        digests += task.result()
                else:
                    await arrived.wait()
        finally:
            for task in running:  # its thread goes on for a moment, and nobody hears of its end
                task.cancel()
        return content_digest(digests)

    def _there(self, waiting: list[TensorSpec]) -> list[TensorSpec]:
        """Takes from the end of those that wait the next ones whose bytes are there."""
        taken: list[TensorSpec] = []
        num_bytes, prefix = 0, self._staging.num_there
        while waiting and num_bytes < _AT_ONCE_BYTES and waiting[-1].offset + waiting[-1].length <= prefix:
            taken.append(waiting.pop())
            num_bytes += taken[-1].length
        return taken

    def _hashed(self, tensors: Sequence[TensorSpec]) -> list[tuple[TensorSpec, str]]:
        arena = self._staging.arena
        return [
            (tensor, tensor_digest(tensor, lambda start, end: arena.view(start, end - start))) for tensor in tensors
        ]


def _num_threads() -> int:
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // _CORES_PER_THREAD))
