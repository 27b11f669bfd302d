"""Weight spans: which output tokens were sampled under which version.

vLLM labels each token with the version of the weights. The adapter needs no label: a request keeps the one that it was
admitted with, to its end.
"""

from collections.abc import Sequence
from functools import lru_cache

from genserve.engine.generation import WeightSpan

INITIAL_LABEL = "default"
"""vLLM's label of the weights it loaded at the start: version 0."""


@lru_cache(maxsize=64)
def version_of(label: str) -> int:
    """The version behind the label that vLLM gives to tokens."""
    return 0 if label == INITIAL_LABEL else int(label)


def spans_between(starts: Sequence[tuple[str, int]], start: int, end: int, lora_version: int = 0) -> list[WeightSpan]:
    """Spans of tokens [start, end), given (label, first token) of every span so far, in order, and the version of the
    request's adapter."""
    spans: list[WeightSpan] = []
    for i, (label, first) in enumerate(starts):
        last = starts[i + 1][1] if i + 1 < len(starts) else end
        if max(first, start) < min(last, end):
            spans.append(WeightSpan(version_of(label), max(first, start), min(last, end), lora_version))
    return spans
