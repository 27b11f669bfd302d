"""The caller that asks for tokens: another process, for a router; the program itself, for a client that calls
replicas. What its messages ask for, which of its requests wait for a replica, and where the answer goes. And a
request as its sender holds it, from its arrival to its end: what policies know of it, and how it is sent."""

import asyncio
import uuid
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from genserve.errors import DeadlineError, GenserveError, InvalidFieldError, QueueFullError, ReplicaLostError
from genserve.forward.resume import Resumption, check_resume
from genserve.forward.upstream import TokenUpstream
from genserve.routing.prefix_blocks import blocks_of_text, blocks_of_tokens
from genserve.routing.replica import Request
from genserve.tensors.varint import to_varint
from genserve.transport.errors import ClientClosedError
from genserve.v1 import generation_pb2
from genserve.wire.bounds import MAX_ABORTED_SEQUENCES, MAX_TEXT_CHARS, check_text

if TYPE_CHECKING:
    from grpc.aio import UnaryStreamCall


_BETWEEN_MESSAGES = "\x1e"  # so that where a message of a chat ends counts as well

_MIN_WEIGHT_VERSION_TAG: Final = to_varint(18 << 3)  # of GenerateRequest
_GENERATE_TAG: Final = b"\x0a"  # of GenerateManyRequest


class Forwarded:
    """A request as it is sent. Senders do not change `message`."""

    __slots__ = ("message", "num_prompt_tokens", "num_sequences", "request", "request_id", "resumption", "was_minted")

    def __init__(self, message: generation_pb2.GenerateRequest) -> None:
        """Raises InvalidFieldError. A request without an id gets one, so that it has the same wherever it is tried."""
        if message.resume:
            check_resume(message)
        self.request = routed(message)
        self.was_minted = not message.request_id
        if self.was_minted:
            message.request_id = uuid.uuid4().hex
        self.request_id = message.request_id
        self.num_sequences = self.request.num_sequences
        self.num_prompt_tokens = len(message.token_ids.ids)
        self.resumption = Resumption(message) if message.resume else None

    def aborted(self) -> generation_pb2.GenerateResponse:
        """The answer, or the end of the answer, to a request that was ended while no replica had it."""
        if self.resumption is not None and self.resumption.num_tokens:
            return self.resumption.end(generation_pb2.FINISH_REASON_ABORTED)
        response = generation_pb2.GenerateResponse(request_id=self.request_id)
        response.prompt.num_tokens = response.usage.num_prompt_tokens = self.num_prompt_tokens
        response.prompt.SetInParent()
        response.usage.SetInParent()
        for index in range(min(self.num_sequences, MAX_ABORTED_SEQUENCES)):
            response.outputs.add(index=index).finish.reason = generation_pb2.FINISH_REASON_ABORTED
        return response


class NumTokens:
    """How many tokens of an answer were delivered, at no cost as long as nobody asks: for one sequence the last message
    tells."""

    __slots__ = ("_ends", "_has_one", "_last")

    def __init__(self, num_sequences: int) -> None:
        self._has_one = num_sequences == 1
        self._last = b""
        self._ends: dict[int, int] = {}

    def note(self, frame: bytes) -> None:
        """A GenerateResponse was delivered."""
        self._last = frame
        if not self._has_one:
            self._read()

    def count(self) -> int:
        """So many, of all sequences."""
        self._read()
        return sum(self._ends.values())

    def _read(self) -> None:
        for delta in generation_pb2.GenerateResponse.FromString(self._last).outputs:
            if delta.weight_spans:
                self._ends[delta.index] = delta.weight_spans[-1].end


def replica_lost(upstream: TokenUpstream, num_tokens: int, *errors: GenserveError) -> ReplicaLostError:
    """The error for a request of which so many tokens were delivered. `errors`: what has happened since."""
    metadata = {"replica": upstream.address, "num_tokens": str(num_tokens)}
    delivered = f"{num_tokens} token{'' if num_tokens == 1 else 's'}"
    reasons = "; ".join(error.message for error in errors)
    return ReplicaLostError(f"replica {upstream.address} was lost after {delivered}: {reasons}", metadata=metadata)


@dataclass(frozen=True, slots=True)
class Loss:
    """Of the replica of a request that is to go on elsewhere."""

    upstream: TokenUpstream
    num_tokens: int
    error: GenserveError

    def with_cause(self, error: GenserveError) -> GenserveError:
        """The failure to report if the request cannot go on, because of this error; unless the caller itself has ended
        it."""
        if isinstance(error, (DeadlineError, ClientClosedError)):
            return error
        return replica_lost(self.upstream, self.num_tokens, self.error, error)


def routed(message: generation_pb2.GenerateRequest) -> Request:
    """The request as policies see it. Raises InvalidFieldError for its session and its id. The rest of it is for the
    replica to check."""
    check_text(message.session_id, "session_id")
    check_text(message.request_id, "request_id")
    return Request(
        prefix_blocks=_blocks(message),
        session_id=message.session_id,
        min_weight_version=message.min_weight_version if message.HasField("min_weight_version") else None,
        lora_name=message.lora_name,
        num_sequences=max(1, message.sampling.n),
    )


def _blocks(message: generation_pb2.GenerateRequest) -> tuple[bytes, ...]:
    lora_name, salt = message.lora_name, message.cache.salt
    kind = message.WhichOneof("prompt")
    if kind == "token_ids":
        return blocks_of_tokens(message.token_ids.ids, lora_name=lora_name, cache_salt=salt)
    if kind == "text":
        return blocks_of_text(message.text, lora_name=lora_name, cache_salt=salt)
    if kind == "chat":
        text = _BETWEEN_MESSAGES.join(part for each in message.chat.messages for part in (each.role, each.content))
        return blocks_of_text(text, lora_name=lora_name, cache_salt=salt)
    return ()


def needed(forwarded: Forwarded, upstream: TokenUpstream) -> int | None:
    """The version to write into a request before it is sent to a replica, None = what it asks for itself is enough. A
    request that goes on elsewhere goes on with weights that are not older than those that sampled its last token."""
    known = upstream.least_version
    if known is None:
        return None
    least = known if forwarded.resumption is None else max(known, forwarded.resumption.last_version)
    asked = forwarded.request.min_weight_version
    return None if least == 0 or (asked is not None and asked >= least) else least


def in_generate(data: bytes, version: int | None) -> bytes:
    """A GenerateRequest that needs this version, without parsing it: of a field that is there twice, a parser takes the
    last, and it merges parts of one message."""
    return data if version is None else data + _field(version)


def in_generate_many(data: bytes, version: int | None) -> bytes:
    """A GenerateManyRequest whose request needs this version."""
    if version is None:
        return data
    field = _field(version)
    return data + _GENERATE_TAG + to_varint(len(field)) + field


def _field(version: int) -> bytes:
    return _MIN_WEIGHT_VERSION_TAG + to_varint(version)


T = TypeVar("T")
MAX_WAITING: Final = 1 << 14
"""Requests that wait in one process. Their messages are kept."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of one request of a stream by an error."""

    request_id: str
    error: GenserveError


class Caller(Protocol):
    """Gets the answer of one call. A write waits while the caller does not read."""

    def remaining_s(self) -> float | None:
        """The time until the call's deadline, None = it has none."""

    async def admitted(self) -> None:
        """The call has been admitted: by a replica, or as a stream."""

    async def write(self, data: bytes) -> None:
        """Passes on a message of the answer."""

    async def fail(self, failures: Sequence[Failure]) -> None:
        """Tells of requests of a stream that have failed."""

    async def refused(self, call: "UnaryStreamCall[bytes, bytes]") -> None:
        """The error that is raised next is the answer of this call of a replica."""


class AbortedWhileWaitingError(Exception):
    """Somebody has ended the request before a replica had it."""


class Waiting:
    """The requests that wait for a replica, of all calls of one sender: bounds how many, and ends them by their ids."""

    def __init__(self, limit: int = MAX_WAITING) -> None:
        self._limit = limit
        self._count = 0
        self._aborts: dict[str, set[asyncio.Future[None]]] = {}

    async def wait(
        self,
        request_id: str,
        routing: Coroutine[Any, Any, T],
        aborted: "asyncio.Future[None] | None" = None,
    ) -> T:
        """The result of `routing`. Raises QueueFullError if too many wait, AbortedWhileWaitingError after `abort` or
        when `aborted` is done."""
        if self._count >= self._limit:
            routing.close()
            raise QueueFullError(f"{self._count} requests wait for a replica, the most that may", retry_after_s=1.0)
        if aborted is None:
            aborted = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(routing)
        self._count += 1
        self._aborts.setdefault(request_id, set()).add(aborted)
        try:
            either: set[asyncio.Future[Any]] = {task, aborted}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if aborted.done():
                raise AbortedWhileWaitingError
            return task.result()
        finally:
            task.cancel()
            aborted.cancel()
            self._count -= 1
            self._aborts[request_id].discard(aborted)
            if not self._aborts[request_id]:
                del self._aborts[request_id]

    def abort(self, request_ids: Collection[str] | None) -> list[str]:
        """Ends the requests with these ids, None = all. Returns the ids of those that waited."""
        found = [each for each in (self._aborts if request_ids is None else request_ids) if each in self._aborts]
        for request_id in found:
            for aborted in self._aborts[request_id]:
                if not aborted.done():
                    aborted.set_result(None)
        return found


@dataclass(frozen=True, slots=True)
class Abort:
    """A request is to end, if it runs."""

    request_id: str

    def message(self) -> bytes:
        """For a replica that runs it."""
        return generation_pb2.GenerateManyRequest(abort=self.request_id).SerializeToString()


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that has arrived. `data`: the message to send for it."""

    forwarded: Forwarded
    data: bytes


Action: TypeAlias = Begun | Abort | Failure


def action_of(message: generation_pb2.GenerateManyRequest, data: bytes | None = None) -> Action:
    """What a message of a GenerateMany call asks for. `data`: the message as it came, None = it is to be serialized."""
    kind = message.WhichOneof("action")
    if kind == "abort":
        return Abort(message.abort)
    if kind is None:
        return Failure("", InvalidFieldError.of("action", "is required: generate or abort"))
    try:
        forwarded = Forwarded(message.generate)
    except GenserveError as error:
        return Failure(message.generate.request_id[:MAX_TEXT_CHARS], error)
    in_columns = message.form == generation_pb2.GENERATE_MANY_FORM_COLUMNS
    if forwarded.resumption is not None and in_columns:
        # Its tokens have to be read here. A client that knows columns knows items as well.
        message.form = generation_pb2.GENERATE_MANY_FORM_ITEMS
    elif not forwarded.was_minted and data is not None:
        return Begun(forwarded, data)
    return Begun(forwarded, message.SerializeToString())
