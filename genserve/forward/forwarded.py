"""A request as its sender holds it, from its arrival to its end."""

import uuid
from dataclasses import dataclass

from genserve.errors import DeadlineError, GenserveError, ReplicaLostError
from genserve.forward.resume import Resumption, check_resume
from genserve.forward.routed import routed
from genserve.forward.upstream import TokenUpstream
from genserve.transport.errors import ClientClosedError
from genserve.v1 import generation_pb2
from genserve.wire.bounds import MAX_ABORTED_SEQUENCES


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
