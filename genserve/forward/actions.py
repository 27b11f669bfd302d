"""What a message of a GenerateMany call says, before it is sent to a replica."""

from dataclasses import dataclass
from typing import TypeAlias

from genserve.errors import GenserveError, InvalidFieldError
from genserve.forward.caller import Failure
from genserve.forward.forwarded import Forwarded
from genserve.v1 import generation_pb2
from genserve.wire.bounds import MAX_TEXT_CHARS


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
    """What a message says. `data`: as it came, None = it is to be serialized."""
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
