"""What policies know of a request, by its message."""

from genserve.routing.prefix_blocks import blocks_of_text, blocks_of_tokens
from genserve.routing.replica import Request
from genserve.v1 import generation_pb2
from genserve.wire.bounds import check_text

_BETWEEN_MESSAGES = "\x1e"  # so that where a message of a chat ends counts as well


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
