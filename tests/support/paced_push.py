"""A push that a test sends piece by piece."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import grpc.aio

from genserve.v1 import weights_pb2, weights_pb2_grpc

Frame = weights_pb2.PushWeightsRequest


class PacedPush:
    """Opens a push of `data` at `address`; on leaving, it is cut off unless it has ended."""

    def __init__(self, address: str, header: weights_pb2.PushHeader, data: bytes) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._data = data
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue()
        self._frames.put_nowait(Frame(header=header))
        push = weights_pb2_grpc.WeightServiceStub(self._channel).PushWeights(self._sent())
        self._answer = asyncio.ensure_future(push)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._answer.cancel()
        await self._channel.close()

    def send(self, start: int, end: int) -> None:
        """Sends these bytes."""
        for position in range(start, end, 1 << 20):
            piece = self._data[position : min(position + (1 << 20), end)]
            self._frames.put_nowait(Frame(chunk=weights_pb2.PushChunk(offset=position, data=piece)))

    async def end(self) -> None:
        """Sends the end frame, and waits for the answer."""
        self._frames.put_nowait(Frame(end=weights_pb2.PushEnd()))
        self._frames.put_nowait(None)
        await self._answer

    async def _sent(self) -> AsyncIterator[Frame]:
        while (frame := await self._frames.get()) is not None:
            yield frame
