"""The version that is written into a request which is not parsed for it."""

from hypothesis import given
from hypothesis import strategies as st

from genserve.forward.forwarded import Forwarded
from genserve.forward.least_version import in_generate, in_generate_many, needed
from genserve.forward.upstream import TokenUpstream
from genserve.v1 import generation_pb2

Request = generation_pb2.GenerateRequest
versions = st.integers(1, 2**32 - 1)


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
