"""Switches of a request, one at a time: two that are both on do not tell which is which."""

from typing import Any

import pytest
from google.protobuf import json_format

from genserve.engine.generation import ChatPrompt, Output, Stop
from genserve.engine.types import EngineInfo
from genserve.rpc.convert.generation_request import generation_request
from genserve.v1 import generation_pb2

INFO = EngineInfo("m", "M", "bfloat16", 100, "cpu", 64, 4, 4, 1, 1, 1, {})


def converted(**fields: Any) -> Any:
    """The request for fields as JSON has them."""
    return generation_request(json_format.ParseDict(fields, generation_pb2.GenerateRequest()), INFO, "minted")


@pytest.mark.parametrize(
    ("field", "stop"), [("ignoreEos", Stop(ignore_eos=True)), ("includeStop", Stop(include_stop=True))]
)
def test_a_switch_of_the_end_turns_on_itself_alone(field: str, stop: Stop) -> None:
    """A request that shall not end at the model's end would show it, and the other way round."""
    assert converted(text="hi", stop={field: True}).stop == stop


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
    assert converted(text="hi", output=fields).output == output


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
