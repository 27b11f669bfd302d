"""vLLM's flat log-probabilities as columns."""

from collections.abc import Sequence
from typing import Protocol

from genserve.engine.generation import LogprobColumns


class FlatLogprobs(Protocol):
    """What is read of vLLM's FlatLogprobs: entries of position i lie in [start_indices[i], end_indices[i])."""

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int | None]


def columns(flat: FlatLogprobs, width: int) -> LogprobColumns:
    """Columns of every position that has entries (a prompt's first token has none), `width` alternatives each.

    The first entry of a position is the token itself, the alternatives follow by rank. Where the two were merged into a
    dictionary on the way (a slow reader), a token that is among the alternatives stands only once: as the first.
    """
    starts = [s for s, e in zip(flat.start_indices, flat.end_indices, strict=True) if e > s]
    ends = [e for s, e in zip(flat.start_indices, flat.end_indices, strict=True) if e > s]
    sampled = [flat.logprobs[s] for s in starts]
    ranks = [flat.ranks[s] or 0 for s in starts]
    if width == 0:
        return LogprobColumns(sampled, ranks, 0, [], [])
    if width < 0:
        width = max((_distinct(flat.token_ids[s:e]) for s, e in zip(starts, ends, strict=True)), default=0)
    token_ids: list[int] = []
    values: list[float] = []
    for start, end in zip(starts, ends, strict=True):
        if end - start == width + 1:
            token_ids += flat.token_ids[start + 1 : end]
            values += flat.logprobs[start + 1 : end]
        else:
            order = sorted(range(start, end), key=lambda i: flat.ranks[i] or 0)[:width]
            token_ids += [flat.token_ids[i] for i in order]
            values += [flat.logprobs[i] for i in order]
    return LogprobColumns(sampled, ranks, width, token_ids, values)


def _distinct(ids: Sequence[int]) -> int:
    return len(set(ids))
