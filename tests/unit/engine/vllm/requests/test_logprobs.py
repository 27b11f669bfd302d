"""Columns out of vLLM's arrays of log-probabilities."""

import math

import numpy as np
import torch
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from genserve.engine.generation import LogprobColumns
from genserve.engine.vllm.requests.logprobs import LogprobRows

Row = tuple[list[int], list[float], int]
"""Token ids and log-probabilities, the sampled token first, and the sampled token's rank."""

ROWS: tuple[Row, ...] = (([7, 7, 8], [-0.125, -0.125, -2.0], 1), ([9, 3, 4], [-5.0, -0.25, -0.5], 11))


def arrays(rows: tuple[Row, ...]) -> LogprobsLists:
    """As vLLM sends them."""
    return LogprobsLists(
        np.array([ids for ids, _, _ in rows], np.int32),
        np.array([values for _, values, _ in rows], np.float32),
        np.array([rank for *_, rank in rows], np.int32),
    )


def sampled(*steps: tuple[Row, ...], width: int) -> LogprobRows:
    """Those of tokens that came in these steps."""
    made = LogprobRows(width, None)
    for rows in steps:
        made.update_from_output(EngineCoreOutput("r", [ids[0] for ids, _, _ in rows], new_logprobs=arrays(rows)))
    return made


def test_the_sampled_token_stands_apart_from_the_alternatives() -> None:
    """Whether or not it is one of them."""
    got = sampled(ROWS, width=2).take()
    assert got == LogprobColumns([-0.125, -5.0], [1, 11], 2, [7, 8, 3, 4], [-0.125, -2.0, -0.25, -0.5])


def test_rows_that_a_slow_reader_left_give_the_same_columns() -> None:
    """Those of several steps, read at once; what is read is gone, and the sum stays."""
    made = sampled(ROWS[:1], ROWS[1:], width=2)
    assert made.take() == sampled(ROWS, width=2).take()
    assert made.take() is None
    assert made.cumulative_logprob == -5.125


def test_width_zero_gives_the_sampled_tokens_alone() -> None:
    """No alternatives were asked for; another request of the step may have asked for some."""
    assert sampled(ROWS, width=0).take() == LogprobColumns([-0.125, -5.0], [1, 11], 0, [], [])


def test_as_many_alternatives_as_were_asked_for() -> None:
    """Of those that the step has for another request; -1 = all of them."""
    got = sampled(ROWS, width=1).take()
    assert got is not None and (got.width, got.token_ids, got.values) == (1, [7, 3], [-0.125, -0.25])
    assert sampled(ROWS, width=-1).take() == sampled(ROWS, width=2).take()


def test_a_step_with_fewer_alternatives_keeps_the_rows_apart() -> None:
    """Another request of the step named its alternatives, and vLLM gives those to all: the rest are impossible."""
    got = sampled(ROWS, width=3).take()
    assert got is not None and (got.width, got.token_ids) == (3, [7, 8, 0, 3, 4, 0])
    assert got.values == [-0.125, -2.0, -math.inf, -0.25, -0.5, -math.inf]


def test_the_first_token_of_a_prompt_has_no_row() -> None:
    """Nothing was predicted there. A prompt may be computed in several steps."""
    made = LogprobRows(None, 2)
    for ids, values, rank in ROWS:
        tensors = LogprobsTensors(torch.tensor([ids]), torch.tensor([values]), torch.tensor([rank]))
        made.update_from_output(EngineCoreOutput("r", [1], new_prompt_logprobs_tensors=tensors))
    assert made.take_prompt() == sampled(ROWS, width=2).take()
    assert (made.take_prompt(), made.take(), made.cumulative_logprob) == (None, None, None)
    assert LogprobRows(None, 2).take_prompt() == LogprobColumns([], [], 2, [], [])
