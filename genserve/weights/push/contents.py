"""The digest of a push's contents, computed while its bytes arrive."""

import asyncio
import os
from collections.abc import Sequence
from typing import Final

from genserve.aio import Change
from genserve.tensors.content import content_digest, tensor_digest
from genserve.tensors.manifest import TensorSpec
from genserve.weights.push.staging import Staging

AT_ONCE_BYTES: Final = 64 << 20
"""Small tensors are hashed together: a turn of a thread costs more than their bytes."""
AT_ONCE_TENSORS: Final = 1024
"""Taking more of them at once would delay token streams."""
_MAX_THREADS: Final = 8
_CORES_PER_THREAD: Final = 4
"""The others are the engine's, and those of the streams that bring the bytes. With fewer than that, hashing would take
cores from these streams: it waits for the last byte."""


class Contents:
    """Hashes each tensor, in threads, as soon as its bytes are there, or all are where there are few cores: they do not
    change any more, whatever attempt has brought them. `arrived` is told whenever some have arrived."""

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
        # In threads, as everything that takes longer with more tensors: there may be 100,000.
        waiting = await asyncio.to_thread(_last_first, self._staging.manifest.tensors)
        digests: list[tuple[TensorSpec, str]] = []
        running: set[asyncio.Task[list[tuple[TensorSpec, str]]]] = set()
        num_meanwhile = _num_threads()
        try:
            while waiting or running:
                arrived = self._arrived.next
                most = max(num_meanwhile, 1) if self._has_every_byte else num_meanwhile
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
        return await asyncio.to_thread(content_digest, digests)

    @property
    def _has_every_byte(self) -> bool:
        return self._staging.there.prefix == self._staging.manifest.total_bytes

    def _there(self, waiting: list[TensorSpec]) -> list[TensorSpec]:
        """Takes from the end of those that wait the next ones whose bytes are there: small ones, or a single one."""
        taken: list[TensorSpec] = []
        num_bytes, prefix = 0, self._staging.there.prefix
        while waiting and len(taken) < AT_ONCE_TENSORS and _end(waiting[-1]) <= prefix:
            num_bytes += waiting[-1].length
            if taken and num_bytes > AT_ONCE_BYTES:
                break
            taken.append(waiting.pop())
        return taken

    def _hashed(self, tensors: Sequence[TensorSpec]) -> list[tuple[TensorSpec, str]]:
        arena = self._staging.arena
        if len(tensors) == 1:
            return [(tensors[0], tensor_digest(tensors[0], lambda start, end: arena.window(start, end - start)))]
        first = tensors[0].offset
        with arena.window(first, _end(tensors[-1]) - first) as there:
            return [
                (tensor, tensor_digest(tensor, lambda start, end: there[start - first : end - first]))
                for tensor in tensors
            ]


def _end(tensor: TensorSpec) -> int:
    return tensor.offset + tensor.length


def _last_first(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    return sorted(tensors, key=lambda tensor: (tensor.offset, tensor.length), reverse=True)


def _num_threads() -> int:
    """How many may hash while bytes arrive."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)) // _CORES_PER_THREAD)
