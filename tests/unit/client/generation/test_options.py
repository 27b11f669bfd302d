"""Keyword arguments become the message, and only those that were given."""

from typing import Any

import pytest

from genserve.client.generation.options import GenerateOptions, generate_request, generate_requests
from genserve.errors import InvalidFieldError
from genserve.v1 import generation_pb2
from tests.support.refusals import refuses


def test_only_given_fields_are_set() -> None:
    """Without options the message has the prompt and nothing else: every default is the daemon's."""
    assert generate_request("hi", {}) == generation_pb2.GenerateRequest(text="hi")


def test_zero_is_a_value_and_none_is_not() -> None:
    """`top_p=0` must reach the daemon as 0, while `top_k=None` is as good as not given."""
    sampling = generate_request("hi", {"top_p": 0.0, "temperature": 0.0, "top_k": None}).sampling
    assert sampling.HasField("top_p")
    assert sampling.top_p == 0
    assert sampling.HasField("temperature")
    assert not sampling.HasField("top_k")


def test_every_option_reaches_a_field_of_its_own() -> None:
    """Each option changes the message, and no two of them change it in the same way."""
    values: GenerateOptions = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5, "presence_penalty": 0.5, "frequency_penalty": 0.5,
        "repetition_penalty": 0.5, "seed": 3, "n": 3, "logit_bias": {3: 0.5}, "allowed_token_ids": [3],
        "bad_words": ["x"], "max_tokens": 3, "min_tokens": 3, "stop": ["x"], "stop_token_ids": [3], "ignore_eos": True,
        "include_stop": True, "time_budget_s": 0.5, "json_schema": "x", "json_object": True, "regex": "x",
        "grammar": "x", "choice": ["x"], "structural_tag": "x", "text": True, "token_ids": True,
        "skip_special_tokens": True, "logprobs": 3, "prompt_logprobs": 3, "prompt_token_ids": True,
        "stream_interval": 3, "add_generation_prompt": True, "continue_final_message": True,
        "template_params": {"x": 3}, "request_id": "x", "lora_name": "x", "priority": 3, "data_parallel_rank": 3,
        "cache_salt": "x", "min_weight_version": 3, "engine_params": {"x": 3},
        "session_id": "x", "resume": True,
    }  # fmt: skip
    assert values.keys() == GenerateOptions.__annotations__.keys()
    chat = [{"role": "user", "content": "hi"}]
    messages = {name: generate_request(chat, {name: value}) for name, value in values.items()}  # type: ignore[misc]
    encoded = {message.SerializeToString(deterministic=True) for message in messages.values()}
    assert len(encoded | {generate_request(chat, {}).SerializeToString(deterministic=True)}) == len(values) + 1


def test_prompts_are_text_token_ids_or_a_chat() -> None:
    """The kind of prompt is told by its type."""
    assert generate_request([1, 2], {}).token_ids.ids == [1, 2]
    assert generate_request([], {}).WhichOneof("prompt") == "token_ids"
    request = generate_request([{"role": "user", "content": "hi"}], {"template_params": {"enable_thinking": False}})
    assert request.chat.messages[0].content == "hi"
    assert request.chat.template_params["enable_thinking"] is False


def test_stop_options_take_their_names_on_the_wire() -> None:
    """`stop` and `time_budget_s` are called otherwise in the proto."""
    stop = generate_request("hi", {"stop": ["\n"], "stop_token_ids": [2], "time_budget_s": 1.5}).stop
    assert stop.strings == ["\n"]
    assert stop.token_ids == [2]
    assert (stop.time_budget.seconds, stop.time_budget.nanos) == (1, 500_000_000)


def test_a_schema_may_be_a_dict() -> None:
    """Dicts are sent as JSON text."""
    assert generate_request("hi", {"json_schema": {"type": "object"}}).json_schema == '{"type": "object"}'
    assert generate_request("hi", {"json_object": True}).WhichOneof("constraint") == "json_object"
    assert generate_request("hi", {"json_object": False}).WhichOneof("constraint") is None


def test_two_constraints_are_refused() -> None:
    """On the wire the second would silently win."""
    with refuses(InvalidFieldError, field="constraint", says="regex, grammar"):
        generate_request("hi", {"regex": "a", "grammar": "b"})


def test_chat_options_without_a_chat_are_refused() -> None:
    """They would silently do nothing."""
    with refuses(InvalidFieldError, field="chat.add_generation_prompt"):
        generate_request("hi", {"add_generation_prompt": False})


@pytest.mark.parametrize(
    ("option", "field"),
    {
        "priority": "priority",
        "top_k": "sampling.top_k",
        "max_tokens": "stop.max_tokens",
        "logprobs": "output.logprobs",
        "time_budget_s": "time_budget_s",
    }.items(),
)
def test_a_value_that_its_field_cannot_hold_is_named_by_its_path(option: str, field: str) -> None:
    """As the daemon names fields."""
    options: Any = {option: "x"}
    with refuses(InvalidFieldError, field=field):
        generate_request("hi", options)


CHAT = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("prompt", "options", "field", "text"),
    [
        ("hi", {"cache_salt": 5}, "cache.salt", "cache_salt=5: "),
        ("hi", {"stop": 5}, "stop.strings", "stop=5: "),
        ("hi", {"stop_token_ids": [1.5]}, "stop.token_ids", "stop_token_ids=[1.5]: "),
        ("hi", {"choice": [5]}, "choice.choices", "choice=[5]: "),
        ("hi", {"regex": 5}, "regex", ""),
        ("hi", {"regex": "a", "grammar": "b"}, "constraint", "regex, grammar"),
        ("hi", {"engine_params": {"a": object()}}, "engine_params", ""),
        ("hi", {"template_params": {"a": 1}}, "chat.template_params", ""),
        ([CHAT], {"template_params": 5}, "chat.template_params", ""),
        ([CHAT], {"continue_final_message": "x"}, "chat.continue_final_message", "'x': "),
        ([{"role": 5}], {}, "chat.messages[0].role", "5: "),
        ([CHAT, 5], {}, "chat.messages[1]", ""),
        ([5, CHAT], {}, "prompt.ids", "prompt=[5, {"),
        ([1, -1], {}, "prompt.ids", "prompt=[1, -1]: "),
        (5, {}, "prompt", "5 "),
        ("\udc80", {}, "prompt", ""),
    ],
)
def test_what_is_wrong_is_named_by_its_path_and_by_its_option(prompt: Any, options: Any, field: str, text: str) -> None:
    """As the daemon names it, and as the caller did."""
    with refuses(InvalidFieldError, field=field, says=text):
        generate_request(prompt, options)


def test_one_of_many_prompts_is_named_by_its_place() -> None:
    """The field is that of the one."""
    with refuses(InvalidFieldError, field="prompt.ids", says="prompts[1]"):
        generate_requests(["a", [-1]], {})
    with refuses(InvalidFieldError, field="prompts", says="'hello'"):
        generate_requests("hello", {})


def test_an_unknown_option_is_named() -> None:
    """A typing mistake is a TypeError, as with any function."""
    with pytest.raises(TypeError, match="temprature"):
        generate_request("hi", {"temprature": 1.0})  # type: ignore[typeddict-unknown-key]
