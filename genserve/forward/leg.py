"""The calls of one GenerateMany to replicas: each is opened when a request of the caller first needs that replica."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic

import grpc.aio

from genserve.aio import Change, is_cancelled
from genserve.forward.attempts import Attempts
from genserve.forward.caller import Failure, Forwarded, Loss, in_generate_many, needed
from genserve.forward.destinations import UpstreamT
from genserve.forward.resume import Resumption
from genserve.forward.upstream import told, until_ended
from genserve.tensors.varint import read_varint
from genserve.v1 import generation_pb2
from genserve.wire.literals import FIRST_SLOT_KEY, SLOTS_PER_CALL

MAX_UNSENT_BYTES: Final = 4 << 20  # to one replica: while so many wait to be sent, new requests go elsewhere
_COLUMNS_TAG: Final = 0x12  # of `columns` in GenerateManyResponse

IDLE_S: Final = 2.0  # after which a call without requests ends: a replica that shuts down waits for its calls


@dataclass(slots=True)
class Running(Generic[UpstreamT]):
    """A request of the stream. `data`: what is sent to a replica, b"" if it will not be sent again. `leg`: where it
    runs, None while it waits. `num_here`: items from there. `is_aborted`: the caller has ended it. `loss`: of the
    replica that ran it before. `slots`: of its sequences, by index; `ends`: how many tokens they had with its last
    item."""

    forwarded: Forwarded
    attempts: Attempts[UpstreamT]
    data: bytes
    leg: "Leg[UpstreamT] | None" = None
    num_here: int = 0
    is_aborted: bool = False
    aborted: "asyncio.Future[None] | None" = None
    loss: Loss | None = None
    slots: Sequence[int] = ()
    ends: dict[int, int] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        """Its id in the stream."""
        return self.forwarded.request_id

    @property
    def resumption(self) -> Resumption | None:
        """How it goes on elsewhere, None if it may not."""
        return self.forwarded.resumption

    def failed(self, error: Exception) -> Failure:
        """Its end by an error. If it was to go on elsewhere, that says what was delivered."""
        known = told(error)
        if self.loss is not None and self.num_here == 0:
            known = self.loss.with_cause(known)
        return Failure(self.request_id, known)

    def response(self, response: generation_pb2.GenerateResponse) -> generation_pb2.GenerateManyItem:
        """Its end by an answer that is no replica's."""
        return generation_pb2.GenerateManyItem(request_id=self.request_id, response=response)


@dataclass(slots=True, eq=False)
class Leg(Generic[UpstreamT]):
    """An upstream call. `number`: which of the numbers of slots are its own. `requests`: those that it carries, by
    their ids. `idle`: ends it when it has carried none for a while. `sending`: `send_all`."""

    upstream: UpstreamT
    number: int
    call: "grpc.aio.StreamStreamCall[bytes, bytes]"
    requests: dict[str, Running[UpstreamT]] = field(default_factory=dict)
    idle: asyncio.TimerHandle | None = None
    sending: "asyncio.Task[None] | None" = None
    _unsent: deque[bytes] = field(default_factory=deque)
    _num_unsent_bytes: int = 0
    _has_unsent: asyncio.Event = field(default_factory=asyncio.Event)
    _in_columns: Counter[int] = field(default_factory=Counter)  # tokens of slots since the last items of their requests

    @classmethod
    def open(cls, upstream: UpstreamT, number: int, timeout_s: float | None) -> "Leg[UpstreamT]":
        """Begins the call."""
        metadata = ((FIRST_SLOT_KEY, str(number * SLOTS_PER_CALL)),)
        return cls(upstream, number, upstream.generate_many(timeout=timeout_s, metadata=metadata))

    @property
    def is_full(self) -> bool:
        """Whether the replica takes nothing, and enough waits to be sent there."""
        return self._num_unsent_bytes >= MAX_UNSENT_BYTES

    def begin(self, running: Running[UpstreamT]) -> None:
        """Sends a request."""
        self.requests[running.request_id] = running
        self.send(in_generate_many(running.data, needed(running.forwarded, self.upstream)))

    def send(self, data: bytes) -> None:
        """Sends a message as soon as the replica takes it. Nobody waits here: a replica that has stopped would keep
        what is meant for the others."""
        self._unsent.append(data)
        self._num_unsent_bytes += len(data)
        self._has_unsent.set()

    async def send_all(self, has_room: Callable[[], None]) -> None:
        """Until it is cancelled, or the call ends: its reader reports that. Calls `has_room` when it is not full any
        more."""
        try:
            await self._send_next(has_room, is_first=True)
            while True:
                await self._send_next(has_room)
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            pass
        except asyncio.CancelledError:
            if is_cancelled():
                raise

    async def _send_next(self, has_room: Callable[[], None], *, is_first: bool = False) -> None:
        while not self._unsent:
            self._has_unsent.clear()
            await self._has_unsent.wait()
        data = self._unsent.popleft()
        write = self.call.write(data)
        await (until_ended(self.call, write) if is_first else write)
        was_full = self.is_full
        self._num_unsent_bytes -= len(data)
        if was_full and not self.is_full:
            has_room()

    # --- how much of its requests was delivered

    def count_columns(self, frame: bytes) -> None:
        """Counts the tokens of a GenerateManyResponse that has only columns."""
        self._count(generation_pb2.GenerateManyResponse.FromString(frame).columns)

    def count(self, response: generation_pb2.GenerateManyResponse) -> None:
        """Counts the tokens of a GenerateManyResponse."""
        self._count(response.columns)
        for item in response.items:
            if (running := self.requests.get(item.request_id)) is None:
                continue
            if item.slots:
                running.slots = tuple(item.slots)
                for slot in running.slots:
                    self._in_columns[slot] = 0
            for delta in item.response.outputs:
                if delta.weight_spans:
                    running.ends[delta.index] = delta.weight_spans[-1].end
                    if delta.index < len(running.slots):
                        self._in_columns[running.slots[delta.index]] = 0

    def num_tokens(self, running: Running[UpstreamT]) -> int:
        """How many tokens of a request were delivered from here, of all its sequences."""
        return sum(running.ends.values()) + sum(self._in_columns[slot] for slot in running.slots)

    def _count(self, all_columns: Iterable[generation_pb2.TokenColumns]) -> None:
        for columns in all_columns:
            if columns.num_tokens:
                for slot, num_tokens in zip(columns.slots, columns.num_tokens, strict=False):
                    self._in_columns[slot] += num_tokens
            else:
                self._in_columns.update(columns.slots)


def has_only_columns(frame: bytes) -> bool:
    """Whether a GenerateManyResponse has no items: it reports no request that begins or ends."""
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


class Legs(Generic[UpstreamT]):
    """The calls of one GenerateMany, one for each replica that runs some of the requests. `room`: tells that one which
    was full has room again, or is gone."""

    def __init__(self) -> None:
        self.room = Change()
        self._legs: dict[UpstreamT, Leg[UpstreamT]] = {}
        self._numbers: set[int] = set()

    @property
    def full(self) -> set[str]:
        """The instance ids of replicas that take nothing more now."""
        return {upstream.instance_id for upstream, leg in self._legs.items() if leg.is_full}

    def to(self, upstream: UpstreamT) -> Leg[UpstreamT] | None:
        """The call to a replica, which stays open until `left`; None = there is none."""
        if (leg := self._legs.get(upstream)) is not None:
            _keep_open(leg)
        return leg

    def open(self, upstream: UpstreamT, timeout_s: float | None) -> Leg[UpstreamT]:
        """Begins a call to a replica."""
        number = next(number for number in range(len(self._numbers) + 1) if number not in self._numbers)
        self._numbers.add(number)
        leg = self._legs[upstream] = Leg.open(upstream, number, timeout_s)
        return leg

    def left(self, leg: Leg[UpstreamT]) -> None:
        """A request is not there any more. Without any, the call ends after a while."""
        if not leg.requests and self._legs.get(leg.upstream) is leg:
            _keep_open(leg)
            leg.idle = asyncio.get_running_loop().call_later(IDLE_S, self._close, leg)

    def forget(self, leg: Leg[UpstreamT]) -> None:
        """The call has ended."""
        _keep_open(leg)
        if leg.sending is not None:
            leg.sending.cancel()
        if self._legs.get(leg.upstream) is leg:
            del self._legs[leg.upstream]
            self.room.notify()

    def free(self, leg: Leg[UpstreamT]) -> None:
        """The caller knows of the end of the call: another one may have its number."""
        self._numbers.discard(leg.number)

    def keep_all(self) -> None:
        """From now on no call ends by itself."""
        for leg in self._legs.values():
            _keep_open(leg)

    def _close(self, leg: Leg[UpstreamT]) -> None:
        self.forget(leg)
        leg.call.cancel()


def _keep_open(leg: Leg[UpstreamT]) -> None:
    if leg.idle is not None:
        leg.idle.cancel()
        leg.idle = None
