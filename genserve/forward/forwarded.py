"""A request as its sender holds it, from its arrival to its end; what policies know of it, and how it is sent."""

import uuid
from dataclasses import dataclass
from typing import Final

from genserve.errors import DeadlineError, GenserveError, ReplicaLostError
from genserve.forward.resume import Resumption, check_resume
from genserve.forward.upstream import TokenUpstream
from genserve.routing.prefix_blocks import blocks_of_text, blocks_of_tokens
from genserve.routing.replica import Request
from genserve.tensors.varint import to_varint
from genserve.transport.errors import ClientClosedError
from genserve.v1 import generation_pb2
from genserve.wire.bounds import MAX_ABORTED_SEQUENCES, check_text

_BETWEEN_MESSAGES = "\x1e"  # so that where a message of a chat ends counts as well

_MIN_WEIGHT_VERSION_TAG: Final = to_varint(18 << 3)  # of GenerateRequest
_GENERATE_TAG: Final = b"\x0a"  # of GenerateManyRequest


class Forwarded:
    """A request as it is sent. `message` is not changed by who sends it."""

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
        """What is told if the request cannot go on, because of this error; unless the caller itself has ended it."""
        if isinstance(error, (DeadlineError, ClientClosedError)):
            return error
        return replica_lost(self.upstream, self.num_tokens, self.error, error)


def routed(message: generation_pb2.GenerateRequest) -> Request:
    """What policies know of a request. Raises InvalidFieldError for its session and its id. The rest of it is for the
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
