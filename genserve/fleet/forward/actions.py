"""What a message of a client's GenerateMany says."""

from dataclasses import dataclass
from typing import TypeAlias

from genserve.arguments import MAX_TEXT_CHARS
from genserve.errors import GenserveError, InvalidFieldError
from genserve.fleet.forward.forwarded import Forwarded
from genserve.v1 import generation_pb2

Refusal: TypeAlias = tuple[str, GenserveError]
"""The id of a request that is refused, and why."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that has arrived. `data`: the message to send for it, None = as it came."""

    forwarded: Forwarded
    data: bytes | None


def action_of(message: generation_pb2.GenerateManyRequest) -> Begun | str | Refusal:
    """The request that a message begins, or the id of the one that it ends, or its refusal."""
    kind = message.WhichOneof("action")
    if kind == "abort":
        return message.abort
    if kind is None:
        return "", InvalidFieldError.of("action", "is required: generate or abort")
    try:
        forwarded = Forwarded(message.generate)
    except GenserveError as error:
        return message.generate.request_id[:MAX_TEXT_CHARS], error
    in_columns = message.form == generation_pb2.GENERATE_MANY_FORM_COLUMNS
    if forwarded.resumption is not None and in_columns:
        # Its tokens have to be read here. A client that knows columns knows items as well.
        message.form = generation_pb2.GENERATE_MANY_FORM_ITEMS
    elif not forwarded.was_minted:
        return Begun(forwarded, None)
    return Begun(forwarded, message.SerializeToString())
