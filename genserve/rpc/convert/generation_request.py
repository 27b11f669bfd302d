"""From GenerateRequest, and its parts, to domain types. A scalar that is not set stays None; zero is a value.

Checks what needs no knowledge of the model, and how many things there are, so that nothing large is made of what will
be refused. Ranges that depend on the model, or that vLLM checks, are the engine's.
"""

import math
from collections.abc import Collection, Mapping, Sequence
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
    prompt_too_long,
)
from genserve.engine.types import EngineInfo
from genserve.errors import InvalidFieldError
from genserve.rpc.convert.values import seconds_or
from genserve.v1 import generation_pb2
from genserve.wire.bounds import check_text

# vLLM searches for every stop string after every token, on the event loop.
MAX_STOP_STRINGS = 256
MAX_STRING_CHARACTERS = 1 << 16
MAX_CONSTRAINT_CHARACTERS = 1 << 18
MAX_LOGIT_BIAS = 100.0
_MAX_PARAMS_BYTES = 1 << 16

_TEXT_CONSTRAINTS = {
    "json_schema": ConstraintKind.JSON,
    "regex": ConstraintKind.REGEX,
    "grammar": ConstraintKind.GRAMMAR,
    "structural_tag": ConstraintKind.STRUCTURAL_TAG,
}


def generation_request(message: generation_pb2.GenerateRequest, info: EngineInfo, minted_id: str) -> GenerationRequest:
    """The request. `minted_id` is its id if it has none. Raises InvalidFieldError with the path of the field, and
    PromptTooLongError."""
    return GenerationRequest(
        request_id=request_id(message.request_id) if message.request_id else minted_id,
        prompt=_prompt(message, info),
        sampling=_sampling(message.sampling, info) if message.HasField("sampling") else Sampling(),
        stop=_stop(message.stop, info) if message.HasField("stop") else Stop(),
        output=_output(message.output) if message.HasField("output") else Output(),
        constraint=None if (kind := message.WhichOneof("constraint")) is None else _constraint(message, kind),
        lora_name=message.lora_name,
        priority=message.priority,
        data_parallel_rank=message.data_parallel_rank if message.HasField("data_parallel_rank") else None,
        cache_salt=message.cache.salt,
        min_weight_version=message.min_weight_version if message.HasField("min_weight_version") else None,
        engine_params=_engine_params(message.engine_params, info) if message.HasField("engine_params") else {},
    )


def request_id(value: str) -> str:
    """The id that a client gave, or ""."""
    check_text(value, "request_id")
    return value


def tokenize_input(message: generation_pb2.TokenizeRequest) -> tuple[TextPrompt | ChatPrompt, bool]:
    """The prompt to tokenise, which may be empty text, and whether special tokens are added."""
    kind = message.WhichOneof("input")
    if kind is None:
        raise InvalidFieldError.of("input", "is required: text or chat")
    adds_special_tokens = message.add_special_tokens if message.HasField("add_special_tokens") else True
    return _chat(message.chat) if kind == "chat" else TextPrompt(message.text), adds_special_tokens


def detokenize_input(message: generation_pb2.DetokenizeRequest, info: EngineInfo) -> tuple[Sequence[int], bool]:
    """The ids to convert to text, and whether special tokens are left out."""
    _refuse_many(message.token_ids, "token_ids", info.max_model_len)
    return list(message.token_ids), message.skip_special_tokens


def _engine_params(struct: Struct, info: EngineInfo) -> dict[str, object]:
    size_bytes = struct.ByteSize()
    most = _MAX_PARAMS_BYTES + 16 * info.max_model_len  # some are lists with one number per token
    _refuse_unless(size_bytes <= most, "engine_params", f"has {size_bytes} of {most} bytes")
    return plain_dict(struct)


def plain_dict(struct: Struct) -> dict[str, object]:
    """A Struct as Python values. JSON has one type of number: integral numbers become int."""
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


def _prompt(message: generation_pb2.GenerateRequest, info: EngineInfo) -> AnyPrompt:
    kind = message.WhichOneof("prompt")
    if kind == "token_ids":
        num_tokens = len(message.token_ids.ids)
        if num_tokens >= info.max_model_len:
            raise prompt_too_long(f"{num_tokens} tokens", num_tokens, info.max_model_len)
        if num_tokens:
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
    # Continuing the last message excludes an assistant turn: only a request for both gets the error.
    opens = message.add_generation_prompt if message.HasField("add_generation_prompt") else not continues
    return ChatPrompt(
        messages=[ChatMessage(each.role, each.content) for each in message.messages],
        add_generation_prompt=opens,
        continue_final_message=continues,
        template_params=plain_dict(message.template_params),
    )


def _sampling(message: generation_pb2.Sampling, info: EngineInfo) -> Sampling:
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidFieldError.of(f"sampling.{name}", f"must be a number, is {value}")
    if given.get("n", 1) < 1:
        raise InvalidFieldError.of("sampling.n", f"must be at least 1, is {given['n']}")
    if "logit_bias" in given:
        given["logit_bias"] = _logit_bias(message.logit_bias, info)
    if "allowed_token_ids" in given:
        given["allowed_token_ids"] = _token_ids(message.allowed_token_ids, "sampling.allowed_token_ids", info)
    if "bad_words" in given:
        _refuse_long(message.bad_words, "sampling.bad_words", MAX_STRING_CHARACTERS)
        given["bad_words"] = list(message.bad_words)
    return Sampling(**given)


def _logit_bias(given: Mapping[int, float], info: EngineInfo) -> dict[int, float]:
    _refuse_many(given, "sampling.logit_bias", info.vocab_size)
    bias = dict(given)
    _refuse_unless(
        all(abs(value) <= MAX_LOGIT_BIAS for value in bias.values()),  # NaN is not
        "sampling.logit_bias",
        f"must be in [{-MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]",
    )
    _token_ids(bias, "sampling.logit_bias", info)
    return bias


def _stop(message: generation_pb2.Stop, info: EngineInfo) -> Stop:
    if message.HasField("max_tokens") and message.max_tokens < 1:
        raise InvalidFieldError.of("stop.max_tokens", f"must be at least 1, is {message.max_tokens}")
    if message.min_tokens < 0:
        raise InvalidFieldError.of("stop.min_tokens", f"must be at least 0, is {message.min_tokens}")
    if message.strings:
        _refuse_many(message.strings, "stop.strings", MAX_STOP_STRINGS)
        _refuse_long(message.strings, "stop.strings", MAX_STRING_CHARACTERS)
        _refuse_unless(all(message.strings), "stop.strings", "contains an empty string")
    return Stop(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens if message.HasField("min_tokens") else None,
        strings=tuple(message.strings),
        token_ids=tuple(_token_ids(message.token_ids, "stop.token_ids", info)) if message.token_ids else (),
        ignore_eos=message.ignore_eos,
        include_stop=message.include_stop,
        time_budget_s=seconds_or(message, "time_budget", None, within="stop"),
    )


def _output(message: generation_pb2.Output) -> Output:
    chosen: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    for name in ("logprobs", "prompt_logprobs"):
        _refuse_unless(chosen.get(name, 0) >= 0, f"output.{name}", f"must be at least 0, is {chosen.get(name)}")
    return Output(**chosen)


def _constraint(message: generation_pb2.GenerateRequest, kind: str) -> Constraint:
    if kind == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT, True)
    if kind == "choice":
        _refuse_unless(bool(message.choice.choices), "choice.choices", "is empty")
        _refuse_long(message.choice.choices, "choice.choices", MAX_CONSTRAINT_CHARACTERS)
        return Constraint(ConstraintKind.CHOICE, list(message.choice.choices))
    text: str = getattr(message, kind)
    _refuse_unless(bool(text), kind, "is empty")
    _refuse_long([text], kind, MAX_CONSTRAINT_CHARACTERS)
    return Constraint(_TEXT_CONSTRAINTS[kind], text)


def _token_ids(ids: Collection[int], field: str, info: EngineInfo) -> Sequence[int]:
    _refuse_many(ids, field, info.vocab_size)
    listed = list(ids)
    lowest = min(listed, default=0)
    _refuse_unless(lowest >= 0, field, f"{lowest} is not a token id")
    return listed


def _refuse_many(values: Collection[object], field: str, limit: int) -> None:
    _refuse_unless(len(values) <= limit, field, f"has {len(values)} entries, of {limit} at most")


def _refuse_long(texts: Collection[str], field: str, limit: int) -> None:
    size = len(texts) + sum(map(len, texts))
    _refuse_unless(size <= limit, field, f"has {size} characters, of {limit} at most")


def _refuse_unless(good: bool, field: str, description: str) -> None:
    if not good:
        raise InvalidFieldError.of(field, description)
