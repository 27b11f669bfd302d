"""Log-probabilities of one sequence, from vLLM's arrays into columns."""

import math
from collections.abc import Sequence
from typing import Any

from genserve.engine.generation import LogprobColumns


class LogprobRows:
    """Takes the place of vLLM's LogprobsProcessor, which keeps every log-probability until the request ends, turns
    alternatives into text, and builds a list of entries that would have to be taken apart again. Here they are columns
    from the beginning, and leave when they are read.

    `width`: alternatives per output token that were asked for, -1 = all; `prompt_width`: the same for the prompt.
    """

    __slots__ = ("_prompt", "_prompt_width", "_rows", "_sum", "_width")

    def __init__(self, width: int | None, prompt_width: int | None) -> None:
        self._width = width
        self._prompt_width = prompt_width or 0
        self._rows: LogprobColumns | None = None
        self._prompt = None if prompt_width is None else _empty(prompt_width)
        self._sum = 0.0

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over all output tokens; None if log-probabilities were not asked for."""
        return None if self._width is None else self._sum

    def update_from_output(self, output: Any) -> None:
        """vLLM's hook: the output of one step for this sequence."""
        if output.new_logprobs is not None and self._width is not None:
            token_ids, logprobs, ranks, _ = output.new_logprobs
            rows = self._rows
            if rows is None:
                rows = self._rows = _empty(self._width)
            values = logprobs.tolist()
            _add(rows, self._width, token_ids.tolist() if self._width else (), values, ranks.tolist())
            for row in values:
                self._sum += row[0]
        if output.new_prompt_logprobs_tensors is not None and self._prompt is not None:
            token_ids, logprobs, ranks, *_ = output.new_prompt_logprobs_tensors
            _add(self._prompt, self._prompt_width, token_ids.tolist(), logprobs.tolist(), ranks.tolist())

    def take(self) -> LogprobColumns | None:
        """Those of the tokens since the last time; None if there are none."""
        rows, self._rows = self._rows, None
        return rows

    def take_prompt(self) -> LogprobColumns | None:
        """Those of the prompt, whose first token has none; None if they were not asked for, or are taken."""
        prompt, self._prompt = self._prompt, None
        return prompt


def _empty(width: int) -> LogprobColumns:
    return LogprobColumns([], [], max(width, 0), [], [])


def _add(
    columns: LogprobColumns,
    width: int,
    token_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    ranks: Sequence[int],
) -> None:
    """Adds tokens. The first entry of a row is the token itself, the alternatives follow by rank: as many as the
    request that asked for the most of them in this step. There are fewer if a request of the step named its
    alternatives (vLLM's logprob_token_ids): the rest is impossible tokens, as vLLM's own padding."""
    columns.ranks += ranks
    if width == 0:
        columns.sampled += [row[0] for row in logprobs]
        return
    for ids, values in zip(token_ids, logprobs, strict=True):
        end = len(ids) if width < 0 else width + 1
        columns.sampled.append(values[0])
        columns.token_ids += ids[1:end]
        columns.values += values[1:end]
        columns.width = end - 1
        if len(ids) < end:
            columns.token_ids += [0] * (end - len(ids))
            columns.values += [-math.inf] * (end - len(ids))
