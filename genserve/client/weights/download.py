"""Pulls the served weights, for a late replica or a file."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from genserve.client.weights.layout import computes_checksums
from genserve.client.weights.resumes import Resumes
from genserve.client.weights.sources import to_torch
from genserve.errors import (
    ChecksumMismatchError,
    GenserveError,
    PushTruncatedError,
    UnavailableError,
    WeightVersionMismatchError,
)
from genserve.tensors.checksum import crc32c_of
from genserve.tensors.manifest import Manifest
from genserve.tensors.safetensors import StoredTensor, write_safetensors
from genserve.transport.connection import Connection
from genserve.transport.fields import build
from genserve.v1 import weights_pb2
from genserve.wire.conversions import manifest_of


@dataclass(frozen=True, slots=True)
class PulledWeights:
    """A version of the weights, in memory."""

    weight_version: int
    tensors: dict[str, StoredTensor] = field(repr=False)

    @property
    def total_bytes(self) -> int:
        """Size of all tensors."""
        return sum(len(tensor.data) for tensor in self.tensors.values())

    def state_dict(self) -> dict[str, Any]:
        """torch tensors over the same memory, by the checkpoint's names. Needs torch."""
        return {name: to_torch(tensor) for name, tensor in self.tensors.items()}

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a .safetensors file, completely or not at all."""
        write_safetensors(Path(path), self.tensors.values())


class Download:
    """Pulls one version over one stream at a time."""

    def __init__(
        self,
        connection: Connection,
        version: int | None,
        chunk_bytes: int,
        progress: Callable[[int, int], None] | None,
        timeout_s: float | None,
    ) -> None:
        self._connection = connection
        self._version = version
        self._chunk_bytes = chunk_bytes
        self._progress = progress
        self._clock = asyncio.get_running_loop().time
        self._deadline_s = None if timeout_s is None else self._clock() + timeout_s
        self._manifest: Manifest | None = None
        self._origin = ""
        self._memory = bytearray()
        self._received_bytes = 0  # chunks arrive in order

    async def run(self) -> PulledWeights:
        """Receives everything. After a broken stream it requests the missing bytes of the same version."""
        resumes = Resumes(self._clock)
        while True:
            known_bytes = self._received_bytes
            try:
                await self._receive()
                return self._pulled()
            except (UnavailableError, PushTruncatedError):
                if self._manifest is None:
                    raise
                if self._received_bytes == len(self._memory):
                    return self._pulled()
                if self._received_bytes > known_bytes:
                    resumes.progress()
                if (pause_s := resumes.next_pause_s()) is None:
                    raise
                remaining_s = self._remaining_s()
                await asyncio.sleep(pause_s if remaining_s is None else min(pause_s, remaining_s))

    async def _receive(self) -> None:
        fields = {"weight_version": self._version, "chunk_bytes": self._chunk_bytes}
        request = build(weights_pb2.PullWeightsRequest, fields)
        if self._received_bytes < len(self._memory):
            request.ranges.add(start=self._received_bytes, end=len(self._memory))
        call = self._connection.weights.PullWeights(
            request, timeout=self._remaining_s(), metadata=self._connection.metadata
        )
        try:
            with self._connection.typed_errors():
                async for frame in call:
                    if frame.WhichOneof("frame") == "end":
                        self._check_complete()
                        return
                    self._take(frame)
        finally:
            call.cancel()
        raise PushTruncatedError("the stream ended without an end frame")

    def _take(self, frame: weights_pb2.PullWeightsResponse) -> None:
        if frame.HasField("header"):
            header = frame.header
            if self._manifest is None:
                self._manifest, self._version = manifest_of(header.manifest), header.weight_version
                self._memory, self._origin = bytearray(self._manifest.total_bytes), header.attempt
            elif header.attempt != self._origin:
                raise WeightVersionMismatchError(
                    f"version {self._version} was replaced by another one under its number",
                    metadata={"weight_version": str(self._version)},
                )
            return
        chunk = frame.chunk
        if chunk.HasField("crc32c") and computes_checksums() and crc32c_of(chunk.data) != chunk.crc32c:
            raise ChecksumMismatchError(f"the chunk of {len(chunk.data)} bytes at {chunk.offset} was damaged")
        if chunk.offset != self._received_bytes or chunk.offset + len(chunk.data) > len(self._memory):
            raise GenserveError(
                f"the daemon sent {len(chunk.data)} bytes from {chunk.offset} on after the first "
                f"{self._received_bytes} of {len(self._memory)}"
            )
        self._memory[chunk.offset : chunk.offset + len(chunk.data)] = chunk.data
        self._received_bytes = chunk.offset + len(chunk.data)
        if self._progress is not None:
            self._progress(self._received_bytes, len(self._memory))

    def _check_complete(self) -> None:
        """Bytes that never came would be zeros of the weights."""
        if self._manifest is None or self._received_bytes < len(self._memory):
            raise GenserveError(f"the daemon ended a pull after {self._received_bytes} of {len(self._memory)} bytes")

    def _pulled(self) -> PulledWeights:
        assert self._manifest is not None and self._version is not None
        memory = memoryview(self._memory)
        tensors = {
            t.name: StoredTensor(t.name, t.dtype, t.shape, memory[t.offset : t.offset + t.length])
            for t in self._manifest.tensors
        }
        return PulledWeights(self._version, tensors)

    def _remaining_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._clock())
