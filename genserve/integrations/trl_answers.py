"""Generations and server information in the shapes that TRL's client returns."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from genserve.client.generation.results import GeneratedSequence, Generation, Logprobs
from genserve.client.state import ServerInfo


class Completions(TypedDict):
    """The answer of `generate` and `chat`. The n completions of a prompt come before those of the next one."""

    prompt_ids: list[list[int]]
    """For each prompt."""
    completion_ids: list[list[int]]
    """For each completion."""
    logprobs: list[list[list[float | None]]] | None
    """For each completion and token: the log-probabilities of the token and its alternatives, highest first."""
    logprob_token_ids: list[list[list[int]]] | None
    """The token ids for `logprobs`."""


class SequenceLogprobs(TypedDict):
    """The answer of `get_sequence_logprobs`, for each sequence and each of its tokens after the prompt."""

    logprobs: list[list[list[float]]]
    """Of the most likely tokens, highest first."""
    logprob_token_ids: list[list[list[int]]]
    """The token ids for `logprobs`."""
    actual_logprobs: list[list[list[float]]]
    """Of the sequence's own token."""
    actual_token_ids: list[list[list[int]]]
    """The sequence's own token."""


def completions(generations: Sequence[Generation], *, with_logprobs: bool) -> Completions:
    """Converts generations that have their prompts' token ids."""
    sequences = [sequence for generation in generations for sequence in generation.sequences]
    rows = [_ranked(sequence) for sequence in sequences] if with_logprobs else None
    return {
        "prompt_ids": [[] if each.prompt is None else each.prompt.token_ids for each in generations],
        "completion_ids": [sequence.token_ids for sequence in sequences],
        "logprobs": None if rows is None else [[[value for _, value in token] for token in row] for row in rows],
        "logprob_token_ids": None if rows is None else [[[each for each, _ in token] for token in row] for row in rows],
    }


def sequence_logprobs(
    generations: Iterable[Generation], sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], width: int
) -> SequenceLogprobs:
    """Converts generations whose prompts are the sequences, with `width` alternatives for each of their tokens."""
    answer = SequenceLogprobs(logprobs=[], logprob_token_ids=[], actual_logprobs=[], actual_token_ids=[])
    for generation, sequence, prompt_length in zip(generations, sequences, prompt_lengths, strict=True):
        known = None if generation.prompt is None else generation.prompt.logprobs
        scores = [_score(known, position, width) for position in range(prompt_length, len(sequence))]
        answer["logprobs"].append([[value for _, value in top] for _, top in scores])
        answer["logprob_token_ids"].append([[token_id for token_id, _ in top] for _, top in scores])
        answer["actual_logprobs"].append([[actual] for actual, _ in scores])
        answer["actual_token_ids"].append([[token_id] for token_id in sequence[prompt_length:]])
    return answer


def vllm_config(info: ServerInfo) -> dict[str, Any]:
    """The part of vLLM's `VllmConfig` that a daemon reports, with vLLM's structure and names."""
    transfer = {"backend": info.weight_transfer} if info.weight_transfer else None
    return {
        "model_config": {
            "model": info.model,
            "dtype": f"torch.{info.dtype}",
            "max_model_len": info.limits.max_model_len,
            "max_logprobs": info.limits.max_logprobs,
            "logprobs_mode": info.logprobs_mode,
        },
        "parallel_config": {
            "tensor_parallel_size": info.tensor_parallel_size,
            "pipeline_parallel_size": info.pipeline_parallel_size,
            "data_parallel_size": info.data_parallel_size,
        },
        "scheduler_config": {"max_num_seqs": info.limits.max_num_seqs},
        "weight_transfer_config": transfer,
    }


def _ranked(sequence: GeneratedSequence) -> list[list[tuple[int, float | None]]]:
    """For each token the (token id, log-probability) pairs of itself and its alternatives, highest first."""
    logprobs = Logprobs() if sequence.logprobs is None else sequence.logprobs
    rows: list[list[tuple[int, float | None]]] = []
    for position, (token_id, sampled) in enumerate(zip(sequence.token_ids, logprobs.sampled, strict=True)):
        pairs = {token_id: sampled, **dict(logprobs.alternatives(position))}
        ranked = sorted(pairs.items(), key=lambda pair: -pair[1])
        rows.append([(each, None if math.isnan(value) else value) for each, value in ranked])
    return rows


def _score(known: Logprobs | None, position: int, width: int) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of the token at `position`, and the `width` highest ones there; the first token has none."""
    if known is None or position == 0:
        return -math.inf, [(0, -math.inf)] * width
    top = [(token_id, _number(value)) for token_id, value in known.alternatives(position - 1)]
    return _number(known.sampled[position - 1]), top + [(0, -math.inf)] * (width - len(top))


def _number(value: float) -> float:
    return -math.inf if math.isnan(value) else value
