"""A push as a trainer might write it, frame by frame."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import torch

from genserve.v1 import weights_pb2, weights_pb2_grpc
from tests.support import models
from tests.support.answers import answer_of

Tensors = dict[str, torch.Tensor]


def replaced(tensors: Tensors, **changes: torch.Tensor | None) -> Tensors:
    """`tensors` with some replaced, or left out (None); dots are written __ in the names."""
    renamed = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return {name: t for name, t in {**tensors, **renamed}.items() if t is not None}


class RawPush:
    """A push written frame by frame, to do what no good client does."""

    def __init__(self, address: str, checkpoint: Path, version: int, push_id: str) -> None:
        self._address = address
        self.data = b""
        self.header = weights_pb2.PushHeader(push_id=push_id, weight_version=version)
        self.header.staging_ttl.FromSeconds(60)
        for name, tensor in sorted(models.load_tensors(checkpoint).items()):
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            self.header.manifest.tensors.add(
                name=name, dtype="BF16", shape=tensor.shape, offset=len(self.data), length=len(raw)
            )
            self.data += raw
        self.header.manifest.total_bytes = len(self.data)

    def frames(self, *chunks: tuple[int, int], **chunk: Any) -> list[weights_pb2.PushWeightsRequest]:
        """The header and chunks [start, end) of the bytes."""
        made = [weights_pb2.PushWeightsRequest(header=self.header)]
        for start, end in chunks:
            piece = weights_pb2.PushChunk(offset=start, data=self.data[start:end], **chunk)
            made.append(weights_pb2.PushWeightsRequest(chunk=piece))
        return made

    async def send(self, frames: list[weights_pb2.PushWeightsRequest], *, end: bool = True, pace_s: float = 0.0) -> Any:
        """Streams the frames, one every `pace_s` seconds; raises the class that a client would."""

        async def requests() -> AsyncIterator[weights_pb2.PushWeightsRequest]:
            for frame in frames:
                yield frame
                await asyncio.sleep(pace_s)
            # A write after the server has refused would hide its answer (grpc.aio reports the write's failure instead).
            await asyncio.sleep(0.1)
            if end:
                yield weights_pb2.PushWeightsRequest(end=weights_pb2.PushEnd())

        from genserve.transport.errors import error_of

        async with grpc.aio.insecure_channel(self._address) as channel:
            try:
                return await answer_of(weights_pb2_grpc.WeightServiceStub(channel).PushWeights(requests(), timeout=90))
            except grpc.aio.AioRpcError as error:
                raise error_of(error, self._address) from error
