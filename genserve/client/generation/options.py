"""Keyword arguments into a `GenerateRequest`. Every option is declared once, here, under its name in the proto.

An option that is not given, or is None, is not set in the message: the daemon's default holds. Zero is a value.
"""

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypedDict

from genserve.errors import InvalidFieldError
from genserve.transport.fields import build, duration, naming, refuse_unknown
from genserve.v1 import generation_pb2, types_pb2

ChatMessage = Mapping[str, str]
"""`{"role": ..., "content": ...}`"""

PromptLike = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or the messages of a chat, oldest first."""


class SamplingOptions(TypedDict, total=False):
    """How tokens are sampled; defaults are those of vLLM's SamplingParams."""

    temperature: float | None
    """0 = greedy; default 1."""
    top_p: float | None
    """In (0, 1]; default 1."""
    top_k: int | None
    """0 or -1 = all tokens; default 0."""
    min_p: float | None
    """In [0, 1]; default 0."""
    presence_penalty: float | None
    """In [-2, 2]; default 0."""
    frequency_penalty: float | None
    """In [-2, 2]; default 0."""
    repetition_penalty: float | None
    """Above 0; default 1."""
    seed: int | None
    """Seed of this request's random numbers; default none."""
    n: int | None
    """Number of sequences; default 1."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits, by token id, each in [-100, 100]."""
    allowed_token_ids: Sequence[int] | None
    """Only these tokens can be sampled."""
    bad_words: Sequence[str] | None
    """Words that must not be produced."""


class StopOptions(TypedDict, total=False):
    """When a sequence ends."""

    max_tokens: int | None
    """Most output tokens of a sequence; default: as many as the context holds."""
    min_tokens: int | None
    """Fewest output tokens before anything else may end it; default 0."""
    stop: str | Sequence[str] | None
    """A string that ends a sequence, or several."""
    stop_token_ids: Sequence[int] | None
    """Tokens that end a sequence."""
    ignore_eos: bool | None
    """Goes on after EOS; default False."""
    include_stop: bool | None
    """Whether the stop string stays in the text; default False."""
    time_budget_s: float | None
    """Seconds from admission after which what was produced is returned (`time_limit`)."""


class ConstraintOptions(TypedDict, total=False):
    """Restricts the output; at most one."""

    json_schema: str | Mapping[str, Any] | None
    """A JSON schema, as text or as a dict."""
    json_object: bool | None
    """True: any JSON object."""
    regex: str | None
    """A regular expression."""
    grammar: str | None
    """A context-free grammar in EBNF."""
    choice: Sequence[str] | None
    """One of these answers."""
    structural_tag: str | Mapping[str, Any] | None
    """xgrammar's structural tags, as JSON text or as a dict."""


class OutputOptions(TypedDict, total=False):
    """What the responses carry."""

    text: bool | None
    """Default True. Without it nothing is detokenised."""
    token_ids: bool | None
    """Default True."""
    skip_special_tokens: bool | None
    """Leaves special tokens out of the text; default True."""
    logprobs: int | None
    """Alternatives per output token; 0 = the sampled token's log-probability only; default: none."""
    prompt_logprobs: int | None
    """The same for the prompt's tokens."""
    prompt_token_ids: bool | None
    """Whether the prompt's token ids are returned; default False."""
    stream_interval: int | None
    """Tokens per message and sequence; 0 = one final message; default: 1 for `stream`, 0 for `generate`."""


class ChatOptions(TypedDict, total=False):
    """How a chat is rendered; refused with any other prompt."""

    add_generation_prompt: bool | None
    """Whether the template opens an assistant turn; default True."""
    continue_final_message: bool | None
    """Whether the last message is continued; default False."""
    template_params: Mapping[str, Any] | None
    """Further arguments of the model's template."""


class GenerateOptions(SamplingOptions, StopOptions, ConstraintOptions, OutputOptions, ChatOptions, total=False):
    """Every option of a request."""

    request_id: str | None
    """Names the request in responses, logs and `abort`; minted by the daemon when not given."""
    lora_name: str | None
    """A LoRA adapter that is loaded in the daemon."""
    priority: int | None
    """Smaller runs first."""
    data_parallel_rank: int | None
    """Data-parallel engine that must run it; default: the least loaded."""
    cache_salt: str | None
    """Only requests with the same salt share prefix cache entries."""
    min_weight_version: int | None
    """Refuse the request while the served version is smaller."""
    engine_params: Mapping[str, Any] | None
    """vLLM's other SamplingParams: those that change this request's own answer and nothing else. Others are refused."""
    session_id: str | None
    """Requests with the same one go to the same replica of a fleet, as long as it can serve them. A daemon ignores
    it."""
    resume: bool | None
    """Whether the request goes on elsewhere if the replica of a fleet that runs it is lost; default False. Only with
    text=False, and without n, constraint, penalties, stop strings, bad_words and engine_params. A daemon ignores it."""


_UNCHANGED: Final = (
    "request_id",
    "lora_name",
    "priority",
    "data_parallel_rank",
    "min_weight_version",
    "session_id",
    "resume",
)
_STOP_FIELDS: Final = {"stop": "strings", "stop_token_ids": "token_ids", "time_budget_s": "time_budget"}
_STOP_OPTIONS: Final = {field: option for option, field in _STOP_FIELDS.items()}


def generate_request(prompt: PromptLike, options: GenerateOptions) -> generation_pb2.GenerateRequest:
    """The message for a prompt and its options.

    Raises TypeError for an option that does not exist; InvalidFieldError for a value that its field cannot hold, text
    where a sequence is needed, two constraints, or chat options without a chat. What the model takes is the daemon's
    to check.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    refuse_unknown(given, GenerateOptions)
    fields: dict[str, Any] = {name: given[name] for name in _UNCHANGED if name in given}
    request = build(generation_pb2.GenerateRequest, fields)
    _set_prompt(request, prompt, _pick(ChatOptions, given))
    if sampling := _pick(SamplingOptions, given):
        request.sampling.CopyFrom(build(generation_pb2.Sampling, sampling, path="sampling"))
    if stop := _pick(StopOptions, given):
        if isinstance(stop.get("stop"), str):
            stop["stop"] = [stop["stop"]]  # as vLLM does
        if "time_budget_s" in stop:
            stop["time_budget_s"] = duration(stop["time_budget_s"], "time_budget_s")
        stop = {_STOP_FIELDS.get(name, name): value for name, value in stop.items()}
        request.stop.CopyFrom(build(generation_pb2.Stop, stop, path="stop", options=_STOP_OPTIONS))
    if output := _pick(OutputOptions, given):
        request.output.CopyFrom(build(generation_pb2.Output, output, path="output"))
    _set_constraint(request, _pick(ConstraintOptions, given))
    if "cache_salt" in given:
        cache = build(generation_pb2.Cache, {"salt": given["cache_salt"]}, path="cache", options={"salt": "cache_salt"})
        request.cache.CopyFrom(cache)
    if "engine_params" in given:
        if not isinstance(given["engine_params"], Mapping):
            raise InvalidFieldError.of("engine_params", "must be a mapping of names to values")
        with naming("engine_params"):
            request.engine_params.update(given["engine_params"])
    return request


def generate_requests(prompts: Iterable[PromptLike], options: GenerateOptions) -> list[generation_pb2.GenerateRequest]:
    """The messages for many prompts, which share their options; raises as `generate_request`, naming the prompt."""
    if isinstance(prompts, str | bytes | Mapping):
        raise InvalidFieldError.of("prompts", f"{reprlib.repr(prompts)} is one prompt; pass a sequence of prompts")
    with naming("prompts"):
        prompts = list(prompts)
    messages = []
    for position, prompt in enumerate(prompts):
        try:
            messages.append(generate_request(prompt, options))
        except InvalidFieldError as error:
            raise InvalidFieldError(f"prompts[{position}]: {error.message}", violations=error.violations) from error
    return messages


def chat(messages: Sequence[ChatMessage], options: ChatOptions) -> generation_pb2.Chat:
    """The message for a chat."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    template_params = given.pop("template_params", None)
    message = build(generation_pb2.Chat, given, path="chat")
    for position, each in enumerate(messages):
        path = f"chat.messages[{position}]"
        with naming(path):
            fields = dict(each)
        message.messages.append(build(generation_pb2.ChatMessage, fields, path=path))
    if template_params is not None:
        with naming("chat.template_params"):
            message.template_params.update(template_params)
    return message


def is_chat(prompt: PromptLike) -> bool:
    """Whether the prompt is a sequence of messages."""
    return not isinstance(prompt, str | Mapping) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _pick(group: type, given: Mapping[str, Any]) -> Any:
    return {name: given[name] for name in group.__annotations__ if name in given}


def _set_prompt(request: generation_pb2.GenerateRequest, prompt: Any, options: ChatOptions) -> None:
    is_sequence = hasattr(prompt, "__len__") and hasattr(prompt, "__getitem__")  # numpy's arrays are, too
    if not is_sequence or isinstance(prompt, bytes | Mapping):
        problem = "must be text, token ids or a list of chat messages"
        raise InvalidFieldError.of("prompt", f"{reprlib.repr(prompt)} {problem}")
    if is_chat(prompt):
        request.chat.CopyFrom(chat(prompt, options))
        return
    if options:
        raise InvalidFieldError.of(f"chat.{next(iter(options))}", "the prompt is not a chat")
    if isinstance(prompt, str):
        with naming("prompt"):
            request.text = prompt
    else:
        request.token_ids.CopyFrom(build(types_pb2.TokenIds, {"ids": prompt}, path="prompt", options={"ids": "prompt"}))


def _set_constraint(request: generation_pb2.GenerateRequest, options: dict[str, Any]) -> None:
    if options.get("json_object") is False:
        del options["json_object"]
    if len(options) > 1:
        raise InvalidFieldError.of("constraint", f"at most one of {', '.join(options)}")
    for name, value in options.items():
        if name == "json_object":
            request.json_object.SetInParent()
        elif name == "choice":
            choice = build(generation_pb2.Choice, {"choices": value}, path="choice", options={"choices": "choice"})
            request.choice.CopyFrom(choice)
        else:
            with naming(name):
                setattr(request, name, json.dumps(value) if isinstance(value, Mapping) else value)
