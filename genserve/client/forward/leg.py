"""One call of GenerateMany to one replica, opened when a request of the caller first needs it."""

import asyncio
from dataclasses import dataclass, field
from typing import Final, Generic

import grpc.aio

from genserve.cancellation import is_cancelled
from genserve.client.forward.attempts import Attempts
from genserve.client.forward.caller import Failure
from genserve.client.forward.destinations import UpstreamT
from genserve.client.forward.forwarded import Forwarded
from genserve.client.forward.least_version import in_generate_many, needed
from genserve.client.forward.loss import told
from genserve.client.forward.resume import Resumption
from genserve.client.forward.upstream import until_ended
from genserve.tensors.varint import read_varint
from genserve.v1 import generation_pb2
from genserve.words import FIRST_SLOT_KEY, SLOTS_PER_CALL

_COLUMNS_TAG: Final = 0x12  # of `columns` in GenerateManyResponse


@dataclass(slots=True)
class Running(Generic[UpstreamT]):
    """A request of the stream. `data`: what is sent to a replica, b"" if it will not be sent again. `leg`: where it
    runs, None while it waits. `num_here`: items from there. `is_aborted`: the caller has ended it."""

    forwarded: Forwarded
    attempts: Attempts[UpstreamT]
    data: bytes
    leg: "Leg[UpstreamT] | None" = None
    num_here: int = 0
    has_begun: bool = False
    is_aborted: bool = False
    aborted: "asyncio.Future[None] | None" = None

    @property
    def request_id(self) -> str:
        """Its id in the stream."""
        return self.forwarded.request_id

    @property
    def resumption(self) -> Resumption | None:
        """How it goes on elsewhere, None if it may not."""
        return self.forwarded.resumption

    def failed(self, error: Exception) -> Failure:
        """Its end by an error."""
        return Failure(self.request_id, told(error))

    def response(self, response: generation_pb2.GenerateResponse) -> generation_pb2.GenerateManyItem:
        """Its end by an answer that is no replica's."""
        return generation_pb2.GenerateManyItem(request_id=self.request_id, response=response)


@dataclass(slots=True, eq=False)
class Leg(Generic[UpstreamT]):
    """An upstream call. `number`: which of the numbers of slots are its own. `requests`: those that it carries, by
    their ids."""

    upstream: UpstreamT
    number: int
    call: "grpc.aio.StreamStreamCall[bytes, bytes]"
    requests: dict[str, Running[UpstreamT]] = field(default_factory=dict)
    idle: asyncio.TimerHandle | None = None
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _has_written: bool = False

    @classmethod
    def open(cls, upstream: UpstreamT, number: int, timeout_s: float | None) -> "Leg[UpstreamT]":
        """Begins the call."""
        metadata = ((FIRST_SLOT_KEY, str(number * SLOTS_PER_CALL)),)
        return cls(upstream, number, upstream.generate_many(timeout=timeout_s, metadata=metadata))

    async def begin(self, running: Running[UpstreamT]) -> None:
        """Sends a request."""
        await self.write(in_generate_many(running.data, needed(running.forwarded, self.upstream)))

    async def write(self, data: bytes) -> None:
        """Sends a message. If the call has ended, its reader tells that."""
        try:
            async with self._writing:
                if self._has_written:
                    await self.call.write(data)
                else:
                    self._has_written = True
                    await until_ended(self.call, self.call.write(data))
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            pass
        except asyncio.CancelledError:
            if is_cancelled():
                raise


def has_only_columns(frame: bytes) -> bool:
    """Whether a GenerateManyResponse has no items: it tells of no request that begins or ends."""
    position, end = 0, len(frame)
    try:
        while position < end:
            if frame[position] != _COLUMNS_TAG:
                return False
            length, position = read_varint(frame, position + 1)
            position += length
    except (IndexError, ValueError):
        return False
    return position == end
