"""What is too large for one message comes in several, which say the same together."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genserve.client.generation.results import Delta, Generation
from genserve.engine.generation import (
    Finish,
    FinishReason,
    GenerationUpdate,
    LogprobColumns,
    PromptInfo,
    SequenceDelta,
    Usage,
    WeightSpan,
)
from genserve.rpc.convert.generation_response import to_response
from genserve.rpc.streams.parts import MAX_PART_VALUES, num_values, parts_of
from genserve.v1 import generation_pb2

LIMIT_BYTES = 2 << 20
"""Half of what clients of gRPC take by default: a part may come behind what is in a message already."""


def rows(num_tokens: int, width: int) -> LogprobColumns:
    """Whose numbers differ, and whose ids have three bytes on the wire."""
    return LogprobColumns(
        [-float(i) for i in range(num_tokens)],
        [100_000 + i for i in range(num_tokens)],
        width,
        [100_000 + i for i in range(num_tokens * width)],
        [-0.5 * i for i in range(num_tokens * width)],
    )


def delta(
    index: int, num_tokens: int, width: int | None, *, text: str = "", ids: bool = True, start: int = 0
) -> SequenceDelta:
    """The last one of a sequence, sampled under two versions."""
    middle = start + num_tokens // 3
    spans = [
        span for span in (WeightSpan(3, start, middle), WeightSpan(4, middle, start + num_tokens)) if span[2] > span[1]
    ]
    finish = Finish(FinishReason.STOP_STRING, "end", start + num_tokens, spans, -1.5)
    token_ids = [200_000 + i for i in range(num_tokens)] if ids else ()
    return SequenceDelta(index, token_ids, text, None if width is None else rows(num_tokens, width), spans, finish)


def summed(responses: list[generation_pb2.GenerateResponse]) -> Generation:
    """What our client makes of them."""
    generation = Generation()
    for response in responses:
        generation.add(Delta(response))
    return generation


def check(update: GenerationUpdate) -> list[GenerationUpdate]:
    """That the parts say what the update says, and are strict deltas. Returns them."""
    parts = list(parts_of(update))
    told = [to_response(part, "r") for part in parts]
    assert summed(told) == summed([to_response(update, "r")])
    assert [part.usage for part in parts] == [None] * (len(parts) - 1) + [update.usage]
    assert all(response.ByteSize() < LIMIT_BYTES for response in told)
    ends: dict[int, int] = {}
    finished: set[int] = set()
    has_output = False
    for part in parts:
        assert part.prompt is None or not has_output, "a prompt goes on before any output"
        has_output = has_output or bool(part.outputs)
        assert len({each.index for each in part.outputs}) == len(part.outputs)
        for each in part.outputs:
            assert each.index not in finished, "a finish is on the last delta of its sequence"
            finished |= {each.index} if each.finish is not None else set()
            for span in each.weight_spans:
                assert span.start == ends.get(each.index, span.start), "spans follow each other"
                ends[each.index] = span.end
            num_tokens = sum(span.end - span.start for span in each.weight_spans)
            assert len(each.token_ids) in (0, num_tokens)
            if each.logprobs is not None:
                assert len(each.logprobs.sampled) == len(each.logprobs.ranks) == num_tokens
                assert len(each.logprobs.values) == num_tokens * each.logprobs.width
    return parts


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        lambda: GenerationUpdate(None, [delta(i, 1300, 20, text="x" * 5000) for i in range(30)], Usage(5, 0, 39_000)),
        lambda: GenerationUpdate(
            PromptInfo(30_000, 7, [1] * 30_000, rows(29_999, 20)), [delta(0, 3, 20)], Usage(30_000, 7, 3)
        ),
        lambda: GenerationUpdate(PromptInfo(5, 0, None, None), [delta(0, 40_000, 20)], None),
        lambda: GenerationUpdate(None, [delta(0, 6, 150_000)], None),  # each row is more than half of a part
        lambda: GenerationUpdate(
            None, [delta(0, 300_000, None, text="\N{SNOWMAN}" * 900_000, ids=False)], Usage(5, 0, 300_000)
        ),
        lambda: GenerationUpdate(
            None, [SequenceDelta(0, (), "\N{SNOWMAN}" * 900_000, None, (), None)], None
        ),  # no labels
        lambda: GenerationUpdate(PromptInfo(600_000, 0, [300_000] * 600_000, None), [delta(0, 1, None)], None),
        lambda: GenerationUpdate(None, [delta(i, 9_000, 20, start=50) for i in range(3)], None),
    ],
    ids=["sequences", "prompt", "rows", "wide", "text", "unlabelled", "ids", "later"],
)
def test_a_large_update_is_told_in_parts(made: Callable[[], GenerationUpdate]) -> None:
    """Each far below the limit, and together the update."""
    assert len(check(made())) > 1


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.builds(
            lambda num_tokens, width, text, ids: (num_tokens, width, text, ids),
            st.integers(0, 4_000),
            st.sampled_from([None, 0, 1, 20]),
            st.integers(0, 60_000),
            st.booleans(),
        ),
        max_size=5,
    ),
    st.sampled_from([None, 10, 30_000]),
)
def test_any_update_is_the_sum_of_its_parts(
    sequences: list[tuple[int, int | None, int, bool]], prompt: int | None
) -> None:
    """Whatever its sequences have."""
    deltas = [
        delta(index, num_tokens, width, text="\N{SNOWMAN}" * text, ids=ids)
        for index, (num_tokens, width, text, ids) in enumerate(sequences)
    ]
    info = None if prompt is None else PromptInfo(prompt, 0, [9] * prompt, rows(prompt - 1, 20))
    check(GenerationUpdate(info, deltas, Usage(1, 0, 1)))


def test_what_fits_is_one_part() -> None:
    """As it is: most updates have one token."""
    update = GenerationUpdate(None, [delta(0, MAX_PART_VALUES // 2, None)], None)
    assert num_values(update) <= MAX_PART_VALUES
    (part,) = parts_of(update)
    assert part == update
