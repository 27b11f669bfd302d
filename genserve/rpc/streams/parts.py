"""Splits an update that is too large for one message: clients of gRPC take 4 MiB unless they ask for more, and one
message that is larger ends their call. Pure."""

from collections.abc import Iterator
from itertools import chain
from typing import Final

from genserve.engine.generation import (
    GenerationUpdate,
    LogprobColumns,
    PromptInfo,
    SequenceDelta,
)

BYTES_PER_VALUE: Final = 7
"""At most, on the wire: an alternative's id (3) and log-probability (4), a sampled token's log-probability and rank."""
MAX_PART_VALUES: Final = 1 << 18
"""Of one part, which so has less than 2 MiB, and fits into a message that is nearly full."""
_VALUES_PER_SPAN: Final = 4
_VALUES_PER_FINISH: Final = 4
"""Of a sequence that has ended: its index, reason, length and sum of log-probabilities."""


def num_values(update: GenerationUpdate) -> int:
    """The approximate size of an update: its tokens, characters and log-probabilities."""
    count = 0 if update.prompt is None else _values_of_prompt(update.prompt)
    for delta in update.outputs:  # as _values_of_delta, without a call for each token: what is rare is asked for last
        count += len(delta.token_ids) + len(delta.text)
        if delta.logprobs is not None or delta.finish is not None:
            count += _values_of_rare(delta)
    return count


def parts_of(update: GenerationUpdate) -> Iterator[GenerationUpdate]:
    """The update as strict deltas of at most MAX_PART_VALUES each, one row of log-probabilities at least. Each is an
    update of the same request. A prompt goes on until it is whole, before any output; the finish of a sequence is on
    the last of its deltas, and the usage on the last part."""
    prompt: PromptInfo | None = None
    deltas: list[SequenceDelta] = []
    room = MAX_PART_VALUES
    if update.prompt is not None:
        *before, prompt = _parts_of_prompt(update.prompt)
        for each in before:
            yield GenerationUpdate(each, (), None)
        room -= _values_of_prompt(prompt)
    for delta in chain.from_iterable(map(_parts_of_delta, update.outputs)):
        size = _values_of_delta(delta)
        is_next_part = bool(deltas) and deltas[-1].index == delta.index
        if is_next_part or (size > room and (prompt is not None or deltas)):
            yield GenerationUpdate(prompt, deltas, None)
            prompt, deltas, room = None, [], MAX_PART_VALUES
        deltas.append(delta)
        room -= size
    yield GenerationUpdate(prompt, deltas, update.usage)


def _values_of_prompt(prompt: PromptInfo) -> int:
    count = len(prompt.token_ids or ())
    return count if prompt.logprobs is None else count + len(prompt.logprobs.values) + len(prompt.logprobs.sampled)


def _values_of_delta(delta: SequenceDelta) -> int:
    return len(delta.token_ids) + len(delta.text) + _values_of_rare(delta)


def _values_of_rare(delta: SequenceDelta) -> int:
    count = 0
    if delta.logprobs is not None:
        count += len(delta.logprobs.values) + len(delta.logprobs.sampled)
    if delta.finish is not None:
        count += _VALUES_PER_FINISH + _VALUES_PER_SPAN * len(delta.finish.weight_spans)
    return count


def _parts_of_prompt(prompt: PromptInfo) -> Iterator[PromptInfo]:
    token_ids, logprobs = prompt.token_ids, prompt.logprobs
    for start, end, _ in _slices(prompt.num_tokens, _values_of_prompt(prompt)):
        yield PromptInfo(
            prompt.num_tokens,
            prompt.num_cached_tokens,
            None if token_ids is None else token_ids[start:end],
            None if logprobs is None else _rows(logprobs, start, end),
        )


def _parts_of_delta(delta: SequenceDelta) -> Iterator[SequenceDelta]:
    size = _values_of_delta(delta)
    if size <= MAX_PART_VALUES:
        yield delta
        return
    spans, text, logprobs = delta.weight_spans, delta.text, delta.logprobs
    first = spans[0].start if spans else 0
    num_tokens = spans[-1].end - first if spans else len(delta.token_ids) or len(text)
    slices = list(_slices(num_tokens, size))
    for start, end, number in slices:
        yield SequenceDelta(
            delta.index,
            delta.token_ids[start:end],
            # Text may lag behind its tokens: what counts is that all parts have their share of it.
            text[len(text) * number // len(slices) : len(text) * (number + 1) // len(slices)],
            None if logprobs is None else _rows(logprobs, start, end),
            [
                span._replace(start=max(span.start, first + start), end=min(span.end, first + end))
                for span in spans
                if max(span.start, first + start) < min(span.end, first + end)
            ],
            delta.finish if number == len(slices) - 1 else None,
        )


def _slices(num_tokens: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, number) of the parts of so many tokens that have so many values together."""
    num_tokens = max(1, num_tokens)
    step = max(1, num_tokens * MAX_PART_VALUES // max(1, size))
    for number, start in enumerate(range(0, num_tokens, step)):
        yield start, min(num_tokens, start + step), number


def _rows(columns: LogprobColumns, start: int, end: int) -> LogprobColumns:
    entries = slice(start * columns.width, end * columns.width)
    return LogprobColumns(
        columns.sampled[start:end],
        columns.ranks[start:end],
        columns.width,
        columns.token_ids[entries],
        columns.values[entries],
    )
