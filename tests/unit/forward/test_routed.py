"""What policies know of a request, by its message."""

import pytest

from genserve.forward.routed import routed
from genserve.v1 import generation_pb2

Request = generation_pb2.GenerateRequest
LONG = list(range(100))


def test_what_is_said_is_known() -> None:
    """And what is not said is none."""
    request = routed(Request(session_id="s", min_weight_version=0, lora_name="l", sampling={"n": 3}, text="x"))
    assert (request.session_id, request.min_weight_version, request.lora_name) == ("s", 0, "l")
    assert request.num_sequences == 3 and request.prefix_blocks == ()
    assert routed(Request(sampling={"n": -1})).num_sequences == 1
    assert routed(Request()).min_weight_version is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"token_ids": {"ids": LONG}}, {"token_ids": {"ids": [*LONG[:50], 7]}}),
        ({"text": "a" * 500}, {"text": "a" * 300 + "b"}),
        (
            {"chat": {"messages": [{"role": "system", "content": "a" * 500}, {"role": "user", "content": "b"}]}},
            {"chat": {"messages": [{"role": "system", "content": "a" * 500}, {"role": "user", "content": "c"}]}},
        ),
    ],
)
def test_prompts_that_begin_alike_share_blocks(one: dict[str, object], other: dict[str, object]) -> None:
    """As far as they do, with the same adapter and salt."""
    blocks = routed(Request(**one)).prefix_blocks
    assert blocks and blocks[0] == routed(Request(**other)).prefix_blocks[0]
    for apart in ({"lora_name": "l"}, {"cache": {"salt": "s"}}):
        assert not set(blocks) & set(routed(Request(**one, **apart)).prefix_blocks)
