"""The requests that wait for a replica, and what a request that is not parsed says of its version."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.errors import QueueFullError
from genserve.forward.caller import (
    AbortedWhileWaitingError,
    Forwarded,
    Waiting,
    in_generate,
    in_generate_many,
    needed,
    routed,
)
from genserve.forward.upstream import TokenUpstream
from genserve.v1 import generation_pb2


async def never() -> str:
    """No replica comes."""
    await asyncio.Event().wait()
    raise AssertionError


async def test_too_many_are_refused_and_room_is_given_back() -> None:
    """However a wait ends."""
    waiting = Waiting(2)
    waits = [asyncio.create_task(waiting.wait("a", never())) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError) as raised:
        await waiting.wait("b", never())
    assert raised.value.retry_after_s == 1.0
    waits[0].cancel()
    assert isinstance((await asyncio.gather(waits[0], return_exceptions=True))[0], asyncio.CancelledError)

    async def found() -> str:
        return "a replica"

    assert await waiting.wait("b", found()) == "a replica"
    assert waiting.abort(["a", "b", "c"]) == ["a"]
    assert isinstance((await asyncio.gather(waits[1], return_exceptions=True))[0], AbortedWhileWaitingError)
    assert waiting.abort(None) == []


async def test_all_are_aborted_or_one_by_its_own_event() -> None:
    """Others with the same id go on waiting."""
    waiting = Waiting()
    aborted = asyncio.get_running_loop().create_future()
    mine = asyncio.create_task(waiting.wait("a", never(), aborted))
    other = asyncio.create_task(waiting.wait("a", never()))
    await asyncio.sleep(0)
    aborted.set_result(None)
    assert isinstance((await asyncio.gather(mine, return_exceptions=True))[0], AbortedWhileWaitingError)
    assert not other.done()
    assert waiting.abort(None) == ["a"]
    assert isinstance((await asyncio.gather(other, return_exceptions=True))[0], AbortedWhileWaitingError)


Request = generation_pb2.GenerateRequest
LONG = list(range(100))

versions = st.integers(1, 2**32 - 1)


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


@given(versions, st.one_of(st.none(), versions), st.lists(st.integers(0, 2**32 - 1)), st.integers(1, 8))
def test_the_request_says_the_version_and_is_else_the_same(
    version: int, asked: int | None, token_ids: list[int], n: int
) -> None:
    """Alone, and as part of a stream; whether it says one already or not."""
    request = Request(request_id="a", token_ids={"ids": token_ids}, sampling={"n": n}, min_weight_version=asked)
    expected = Request()
    expected.CopyFrom(request)
    expected.min_weight_version = version
    assert Request.FromString(in_generate(request.SerializeToString(), version)) == expected
    form = generation_pb2.GENERATE_MANY_FORM_COLUMNS
    message = generation_pb2.GenerateManyRequest(generate=request, form=form)
    told = generation_pb2.GenerateManyRequest.FromString(in_generate_many(message.SerializeToString(), version))
    assert told == generation_pb2.GenerateManyRequest(generate=expected, form=form)


def test_no_version_changes_nothing() -> None:
    """The bytes are those that came."""
    data = b"whatever"
    assert in_generate(data, None) is data and in_generate_many(data, None) is data


class Known(TokenUpstream):
    """A replica that serves this version, as far as its sender knows."""

    def __init__(self, version: int | None) -> None:
        self._version = version

    @property
    def least_version(self) -> int | None:
        return self._version


def test_the_higher_one_is_needed() -> None:
    """Of what the request asks for and what all replicas are known to serve. All serve version 0."""

    def version(asked: int | None, known: int | None) -> int | None:
        return needed(Forwarded(Request(text="x", min_weight_version=asked)), Known(known))

    assert [version(asked, known) for asked, known in ((None, None), (3, None), (None, 0))] == [None] * 3
    assert [version(asked, 3) for asked in (None, 0, 2, 3, 4)] == [3, 3, 3, None, None]


def test_a_request_that_goes_on_does_not_go_back() -> None:
    """To weights that are older than those that sampled its last token. A router does not write this."""
    forwarded = Forwarded(Request(text="x", resume=True, output={"text": False}))
    assert forwarded.resumption is not None
    spans = [{"version": version, "start": version, "end": version + 1} for version in (2, 4)]
    forwarded.resumption.take(generation_pb2.GenerateResponse(outputs=[{"token_ids": [1, 2], "weight_spans": spans}]))
    assert [needed(forwarded, Known(known)) for known in (3, 5, None)] == [4, 5, None]
