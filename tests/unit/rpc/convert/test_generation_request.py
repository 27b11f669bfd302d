"""Requests arrive in the daemon as they were meant: presence is kept, and nonsense is named by its field."""

from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct

from genserve.engine.generation import (
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
from genserve.engine.types import EngineInfo
from genserve.errors import InvalidFieldError, PromptTooLongError
from genserve.rpc.convert.generation_request import detokenize_input, generation_request, plain_dict, tokenize_input
from genserve.v1 import generation_pb2

# A vocabulary of 100 tokens, and a context of 64.
INFO = EngineInfo("m", "M", "bfloat16", 100, "cpu", 64, 4, 4, 4, 1, 1, 1, {})


def converted(**fields: Any) -> GenerationRequest:
    """The request for fields as JSON has them; a prompt is added if there is none."""
    if not fields.keys() & {"text", "tokenIds", "chat"}:
        fields["text"] = "hi"
    return generation_request(json_format.ParseDict(fields, generation_pb2.GenerateRequest()), INFO, "minted")


def refused_field(**fields: Any) -> str:
    """The path of the field for which a request is refused."""
    with pytest.raises(InvalidFieldError) as caught:
        converted(**fields)
    (violation,) = caught.value.violations
    return violation.field


def test_a_bare_request_has_the_defaults_of_the_engine() -> None:
    """What is not set is None: the engine's own default holds."""
    assert converted() == GenerationRequest("minted", TextPrompt("hi"))


def test_zero_is_a_value() -> None:
    """`top_p: 0` must not become 1.0; the engine refuses it, not the wire."""
    names = ("temperature", "topP", "topK", "minP", "presencePenalty", "frequencyPenalty", "repetitionPenalty", "seed")
    assert converted(sampling=dict.fromkeys(names, 0)).sampling == Sampling(0, 0, 0, 0, 0, 0, 0, 0)
    zeros = converted(
        output={"text": False, "tokenIds": False, "skipSpecialTokens": False, "logprobs": 0, "streamInterval": 0},
        stop={"minTokens": 0},
        minWeightVersion=0,
        dataParallelRank=0,
    )
    assert zeros.output == Output(text=False, token_ids=False, skip_special_tokens=False, logprobs=0, stream_interval=0)
    assert zeros.stop == Stop(min_tokens=0)
    assert (zeros.min_weight_version, zeros.data_parallel_rank) == (0, 0)


def test_everything_that_can_be_set_arrives() -> None:
    """Field by field."""
    request = converted(
        requestId="r1",
        tokenIds={"ids": [3, 0, 5]},
        sampling={"n": 2, "seed": "-7", "logitBias": {"5": -1.5}, "allowedTokenIds": [1, 2], "badWords": ["no"]},
        stop={
            "maxTokens": 9, "minTokens": 1, "strings": ["."], "tokenIds": [0], "ignoreEos": True, "includeStop": True,
            "timeBudget": "1.5s",
        },
        output={"logprobs": 3, "promptLogprobs": 2, "promptTokenIds": True, "streamInterval": 8},
        loraName="l", priority=-3, dataParallelRank=1, cache={"salt": "s"}, minWeightVersion=4,
        engineParams={"thinking_token_budget": 5},
    )  # fmt: skip
    assert request == GenerationRequest(
        request_id="r1",
        prompt=TokenPrompt([3, 0, 5]),
        sampling=Sampling(n=2, seed=-7, logit_bias={5: -1.5}, allowed_token_ids=[1, 2], bad_words=["no"]),
        stop=Stop(9, 1, (".",), (0,), True, True, 1.5),
        output=Output(logprobs=3, prompt_logprobs=2, prompt_token_ids=True, stream_interval=8),
        lora_name="l",
        priority=-3,
        data_parallel_rank=1,
        cache_salt="s",
        min_weight_version=4,
        engine_params={"thinking_token_budget": 5},
    )


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"jsonSchema": "{}"}, Constraint(ConstraintKind.JSON, "{}")),
        ({"jsonObject": {}}, Constraint(ConstraintKind.JSON_OBJECT, True)),
        ({"regex": "a+"}, Constraint(ConstraintKind.REGEX, "a+")),
        ({"grammar": "root ::= x"}, Constraint(ConstraintKind.GRAMMAR, "root ::= x")),
        ({"choice": {"choices": ["a", "b"]}}, Constraint(ConstraintKind.CHOICE, ["a", "b"])),
        ({"structuralTag": "{}"}, Constraint(ConstraintKind.STRUCTURAL_TAG, "{}")),
    ],
)
def test_every_constraint_arrives(fields: dict[str, Any], constraint: Constraint) -> None:
    """An empty message, such as json_object, is one too."""
    assert converted(**fields).constraint == constraint


def test_a_chat_arrives_with_the_template_s_defaults() -> None:
    """An assistant turn is opened unless the last message is continued; who asks for both gets both."""
    messages = [{"role": "user", "content": "hi"}]
    parsed = [ChatMessage("user", "hi")]
    assert converted(chat={"messages": messages}).prompt == ChatPrompt(parsed, True, False, {})
    continued = converted(chat={"messages": messages, "continueFinalMessage": True})
    assert continued.prompt == ChatPrompt(parsed, False, True, {})
    both = {"continueFinalMessage": True, "addGenerationPrompt": True, "templateParams": {"enable_thinking": False}}
    assert converted(chat={"messages": messages, **both}).prompt == ChatPrompt(
        parsed, True, True, {"enable_thinking": False}
    )


def test_numbers_of_a_struct_are_integers_where_they_can_be() -> None:
    """JSON knows doubles only, and vLLM tells 5 from 5.0."""
    struct = Struct()
    struct.update({"i": 5, "f": 0.5, "b": True, "n": None, "s": "x", "l": [1, 2.5, {"k": -3}], "d": {"e": []}})
    plain = plain_dict(struct)
    assert plain == {"i": 5, "f": 0.5, "b": True, "n": None, "s": "x", "l": [1, 2.5, {"k": -3}], "d": {"e": []}}
    assert [type(plain[name]) for name in ("i", "f", "b")] == [int, float, bool]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"text": ""}, "text"),
        ({"tokenIds": {}}, "token_ids"),
        ({"chat": {}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "user"}, {"content": "x"}]}}, "chat.messages[1].role"),
        ({"requestId": "a\nb"}, "request_id"),
        ({"requestId": "a" * 257}, "request_id"),
        ({"sampling": {"n": 0}}, "sampling.n"),
        ({"sampling": {"temperature": "NaN"}}, "sampling.temperature"),
        ({"sampling": {"topP": "Infinity"}}, "sampling.top_p"),
        ({"sampling": {"logitBias": {"-1": 1}}}, "sampling.logit_bias"),
        ({"sampling": {"logitBias": {"1": "NaN"}}}, "sampling.logit_bias"),
        ({"sampling": {"logitBias": {"1": -100.5}}}, "sampling.logit_bias"),
        ({"sampling": {"logitBias": {str(i): 1 for i in range(101)}}}, "sampling.logit_bias"),
        ({"sampling": {"allowedTokenIds": [1] * 101}}, "sampling.allowed_token_ids"),
        ({"sampling": {"badWords": ["x" * 65536]}}, "sampling.bad_words"),
        ({"stop": {"tokenIds": [1] * 101}}, "stop.token_ids"),
        ({"stop": {"strings": ["x"] * 257}}, "stop.strings"),
        ({"stop": {"strings": ["x" * 65536]}}, "stop.strings"),
        ({"regex": "x" * (1 << 18)}, "regex"),
        ({"choice": {"choices": ["x"] * (1 << 18)}}, "choice.choices"),
        ({"engineParams": {"x": "x" * 70_000}}, "engine_params"),
        ({"sampling": {"allowedTokenIds": [1, -1]}}, "sampling.allowed_token_ids"),
        ({"stop": {"maxTokens": 0}}, "stop.max_tokens"),
        ({"stop": {"minTokens": -1}}, "stop.min_tokens"),
        ({"stop": {"strings": [""]}}, "stop.strings"),
        ({"stop": {"tokenIds": [-1]}}, "stop.token_ids"),
        ({"stop": {"timeBudget": "0s"}}, "stop.time_budget"),
        ({"stop": {"timeBudget": "-1s"}}, "stop.time_budget"),
        ({"stop": {"timeBudget": "99999999999s"}}, "stop.time_budget"),
        ({"output": {"logprobs": -1}}, "output.logprobs"),
        ({"output": {"promptLogprobs": -1}}, "output.prompt_logprobs"),
        ({"regex": ""}, "regex"),
        ({"jsonSchema": ""}, "json_schema"),
        ({"choice": {}}, "choice.choices"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], path: str) -> None:
    """By its path in the message, as clients wrote it."""
    assert refused_field(**fields) == path


@pytest.mark.parametrize("bias", [100.0, -100.0])
def test_the_largest_bias_is_a_hundred_either_way(bias: float) -> None:
    """As with OpenAI's API."""
    assert converted(sampling={"logitBias": {"1": bias}}).sampling.logit_bias == {1: bias}
    assert refused_field(sampling={"logitBias": {"1": bias * 1.001}}) == "sampling.logit_bias"


def test_engine_parameters_have_room_for_a_list_as_long_as_the_context() -> None:
    """64 KiB, and 16 bytes for each of 64 tokens: not one byte more."""
    request = generation_pb2.GenerateRequest(text="hi")
    request.engine_params["x"] = "x" * 66_000
    num_characters = 66_000 + (1 << 16) + 16 * 64 - request.engine_params.ByteSize()
    assert converted(engineParams={"x": "x" * num_characters}).engine_params == {"x": "x" * num_characters}
    assert refused_field(engineParams={"x": "x" * (num_characters + 1)}) == "engine_params"


def test_a_request_without_a_prompt_is_refused() -> None:
    """All the rest being well."""
    with pytest.raises(InvalidFieldError) as caught:
        generation_request(generation_pb2.GenerateRequest(request_id="r"), INFO, "minted")
    assert caught.value.violations[0].field == "prompt"


def test_empty_text_can_be_tokenized_but_nothing_cannot() -> None:
    """Zero tokens, or the special ones, are an answer."""
    assert tokenize_input(generation_pb2.TokenizeRequest(text="")) == (TextPrompt(""), True)
    with pytest.raises(InvalidFieldError) as caught:
        tokenize_input(generation_pb2.TokenizeRequest())
    assert caught.value.violations[0].field == "input"


def test_a_prompt_that_leaves_no_room_is_refused_before_its_ids_are_copied() -> None:
    """As the engine would: both lengths are told."""
    assert converted(tokenIds={"ids": [1] * 63}).prompt == TokenPrompt([1] * 63)
    with pytest.raises(PromptTooLongError) as caught:
        converted(tokenIds={"ids": [1] * 64})
    assert caught.value.metadata == {"num_tokens": "64", "max_model_len": "64"}


def test_no_more_ids_are_turned_into_text_than_a_context_holds() -> None:
    """Nothing longer was ever generated."""
    assert detokenize_input(generation_pb2.DetokenizeRequest(token_ids=[1] * 64), INFO) == ([1] * 64, False)
    with pytest.raises(InvalidFieldError) as caught:
        detokenize_input(generation_pb2.DetokenizeRequest(token_ids=[1] * 65), INFO)
    assert caught.value.violations[0].field == "token_ids"


# --- switches, one at a time: two that are both on do not tell which is which


@pytest.mark.parametrize(
    ("field", "stop"), [("ignoreEos", Stop(ignore_eos=True)), ("includeStop", Stop(include_stop=True))]
)
def test_a_switch_of_the_end_turns_on_itself_alone(field: str, stop: Stop) -> None:
    """A request that shall not end at the model's end would show it, and the other way round."""
    assert converted(stop={field: True}).stop == stop


@pytest.mark.parametrize(
    ("fields", "output"),
    [
        ({"text": False}, Output(text=False)),
        ({"tokenIds": False}, Output(token_ids=False)),
        ({"skipSpecialTokens": False}, Output(skip_special_tokens=False)),
        ({"promptTokenIds": True}, Output(prompt_token_ids=True)),
    ],
)
def test_a_switch_of_the_output_changes_itself_alone(fields: dict[str, bool], output: Output) -> None:
    """The others are as they would be without it."""
    assert converted(output=fields).output == output


@pytest.mark.parametrize(
    ("fields", "opens", "continues"),
    [
        ({}, True, False),
        ({"continueFinalMessage": True}, False, True),
        ({"addGenerationPrompt": False}, False, False),
        ({"addGenerationPrompt": True, "continueFinalMessage": True}, True, True),
    ],
)
def test_a_chat_opens_a_turn_or_continues_one(fields: dict[str, bool], opens: bool, continues: bool) -> None:
    """Unless it says both, which the engine refuses."""
    prompt = converted(chat={"messages": [{"role": "user", "content": "hi"}], **fields}).prompt
    assert isinstance(prompt, ChatPrompt)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (opens, continues)
