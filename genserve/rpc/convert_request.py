"""From GenerateRequest, and its parts, to domain types. A scalar that is not set stays None; zero is a value.

Checks what needs no knowledge of the model: ranges that depend on it, or that vLLM checks, are the engine's.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from genserve.engine.generation import (
    AnyPrompt,
    ChatMessage,
    ChatPrompt,
    Constraint,
    ConstraintKind,
    GenerationRequest,
    Output,
    Sampling,
    Stop,
    TextPrompt,
    TokenPrompt,
)
from genserve.errors import InvalidFieldError
from genserve.rpc.convert import seconds
from genserve.v1 import generation_pb2

MAX_ID_LENGTH = 256

_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_TEXT_CONSTRAINTS = {
    "json_schema": ConstraintKind.JSON,
    "regex": ConstraintKind.REGEX,
    "grammar": ConstraintKind.GRAMMAR,
    "structural_tag": ConstraintKind.STRUCTURAL_TAG,
}


def generation_request(message: generation_pb2.GenerateRequest, minted_id: str) -> GenerationRequest:
    """The request; `minted_id` is its id when it names none. Raises InvalidFieldError with the path of the field."""
    return GenerationRequest(
        request_id=request_id(message.request_id) or minted_id,
        prompt=_prompt(message),
        sampling=_sampling(message.sampling) if message.HasField("sampling") else Sampling(),
        stop=_stop(message.stop) if message.HasField("stop") else Stop(),
        output=_output(message.output) if message.HasField("output") else Output(),
        constraint=_constraint(message),
        lora_name=message.lora_name,
        priority=message.priority,
        data_parallel_rank=_given(message, "data_parallel_rank"),
        cache_salt=message.cache.salt,
        min_weight_version=_given(message, "min_weight_version"),
        engine_params=plain_dict(message.engine_params),
    )


def request_id(value: str) -> str:
    """An id as a client gives it, perhaps none."""
    if len(value) > MAX_ID_LENGTH or not value.isprintable():
        raise InvalidFieldError.of("request_id", f"must be printable and at most {MAX_ID_LENGTH} characters long")
    return value


def tokenize_input(message: generation_pb2.TokenizeRequest) -> TextPrompt | ChatPrompt:
    """What is to be turned into tokens; empty text is a text."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidFieldError.of("input", "is required: text or chat")
    return _chat(message.chat) if kind == "chat" else TextPrompt(message.text)


def plain_dict(struct: Struct) -> dict[str, object]:
    """A Struct as Python values. JSON knows one kind of number: integral ones become int."""
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: Value) -> object:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() else number
    if kind == "struct_value":
        return plain_dict(value.struct_value)
    if kind == "list_value":
        return [_plain(item) for item in value.list_value.values]
    return None if kind is None or kind == "null_value" else getattr(value, kind)


def _prompt(message: generation_pb2.GenerateRequest) -> AnyPrompt:
    kind = message.WhichOneof("prompt")
    if kind == "token_ids":
        if message.token_ids.ids:
            return TokenPrompt(list(message.token_ids.ids))
        raise InvalidFieldError.of("token_ids", "is empty")
    if kind == "text":
        if message.text:
            return TextPrompt(message.text)
        raise InvalidFieldError.of("text", "is empty")
    if kind == "chat":
        return _chat(message.chat)
    raise InvalidFieldError.of("prompt", "is required: text, token_ids or chat")


def _chat(message: generation_pb2.Chat) -> ChatPrompt:
    if not message.messages:
        raise InvalidFieldError.of("chat.messages", "is empty")
    for index, each in enumerate(message.messages):
        if not each.role:
            raise InvalidFieldError.of(f"chat.messages[{index}].role", "is empty")
    continues = message.continue_final_message
    # A message that is continued leaves no room for an assistant turn: only who asks for both gets the error.
    opens = message.add_generation_prompt if message.HasField("add_generation_prompt") else not continues
    return ChatPrompt(
        messages=[ChatMessage(each.role, each.content) for each in message.messages],
        add_generation_prompt=opens,
        continue_final_message=continues,
        template_params=plain_dict(message.template_params),
    )


def _sampling(message: generation_pb2.Sampling) -> Sampling:
    floats = {name: _given(message, name) for name in _FLOATS}
    for name, value in floats.items():
        _refuse_unless(value is None or math.isfinite(value), f"sampling.{name}", f"must be a number, is {value}")
    n = _given(message, "n")
    _refuse_unless(n is None or n >= 1, "sampling.n", f"must be at least 1, is {n}")
    bias = dict(message.logit_bias)
    _refuse_unless(all(map(math.isfinite, bias.values())), "sampling.logit_bias", "must be numbers")
    return Sampling(
        **floats,
        top_k=_given(message, "top_k"),
        seed=_given(message, "seed"),
        n=n,
        logit_bias=dict(zip(_token_ids(bias, "sampling.logit_bias"), bias.values(), strict=True)) or None,
        allowed_token_ids=_token_ids(message.allowed_token_ids, "sampling.allowed_token_ids") or None,
        bad_words=list(message.bad_words) or None,
    )


def _stop(message: generation_pb2.Stop) -> Stop:
    _refuse_unless(all(message.strings), "stop.strings", "holds an empty string")
    return Stop(
        max_tokens=_given(message, "max_tokens"),
        min_tokens=_given(message, "min_tokens"),
        strings=tuple(message.strings),
        token_ids=tuple(_token_ids(message.token_ids, "stop.token_ids")),
        ignore_eos=message.ignore_eos,
        include_stop=message.include_stop,
        time_budget_s=seconds(message.time_budget, "stop.time_budget") if message.HasField("time_budget") else None,
    )


def _output(message: generation_pb2.Output) -> Output:
    chosen: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    for name in ("logprobs", "prompt_logprobs"):
        _refuse_unless(chosen.get(name, 0) >= 0, f"output.{name}", f"must be at least 0, is {chosen.get(name)}")
    return Output(**chosen)


def _constraint(message: generation_pb2.GenerateRequest) -> Constraint | None:
    kind = message.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT, True)
    if kind == "choice":
        _refuse_unless(bool(message.choice.choices), "choice.choices", "is empty")
        return Constraint(ConstraintKind.CHOICE, list(message.choice.choices))
    text: str = getattr(message, kind)
    _refuse_unless(bool(text), kind, "is empty")
    return Constraint(_TEXT_CONSTRAINTS[kind], text)


def _token_ids(ids: Iterable[int], field: str) -> Sequence[int]:
    listed = list(ids)
    lowest = min(listed, default=0)
    _refuse_unless(lowest >= 0, field, f"{lowest} is no token id")
    return listed


def _given(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _refuse_unless(good: bool, field: str, description: str) -> None:
    if not good:
        raise InvalidFieldError.of(field, description)
