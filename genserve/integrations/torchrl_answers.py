"""Generations in the shape of vLLM's RequestOutput, whose fields torchrl's vLLMWrapper reads.

Not vLLM's own classes, so that vLLM is not imported. The wrapper passes every field of a completion on by its name, so
`CompletionOutput` has only fields that vLLM's has.
"""

from dataclasses import dataclass, field
from typing import Final

from genserve.client.generation.results import GeneratedSequence, Generation, Logprobs, Prompt

# What ended a sequence, in the words of vLLM.
_FINISH_REASONS: Final = {
    "eos": "stop",
    "stop_string": "stop",
    "stop_token": "stop",
    "time_limit": "length",
    "aborted": "abort",
    "paused": "abort",
}


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token. `rank`: 1 = most likely. Tokens are not decoded here."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One of the n sequences. `logprobs`: for each token those of itself and its alternatives, by token id."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A complete generation. `generation` is the original, with the spans of weight versions."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    generation: Generation = field(repr=False)
    finished: bool = True
    metrics: None = None
    lora_request: object = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None


def request_output(generation: Generation, text: str | None, lora_request: object = None) -> RequestOutput:
    """Converts a generation that has its prompt's token ids. `text`: of the prompt, None if it was token ids."""
    prompt = Prompt(0, 0, [], None) if generation.prompt is None else generation.prompt
    return RequestOutput(
        request_id=generation.request_id,
        prompt=text,
        prompt_token_ids=prompt.token_ids,
        prompt_logprobs=_of_prompt(prompt),
        outputs=[_completion(sequence) for sequence in generation.sequences],
        num_cached_tokens=prompt.num_cached_tokens,
        generation=generation,
        lora_request=lora_request,
    )


def _completion(sequence: GeneratedSequence) -> CompletionOutput:
    finish = sequence.finish
    output = CompletionOutput(
        index=sequence.index,
        text=sequence.text,
        token_ids=sequence.token_ids,
        cumulative_logprob=None,
        logprobs=None if sequence.logprobs is None else _rows(sequence.token_ids, sequence.logprobs),
    )
    if finish is not None:
        output.cumulative_logprob = finish.cumulative_logprob
        output.finish_reason = _FINISH_REASONS.get(finish.reason, finish.reason)
        output.stop_reason = finish.stop_string if finish.stop_token_id is None else finish.stop_token_id
    return output


def _of_prompt(prompt: Prompt) -> list[dict[int, Logprob] | None] | None:
    """The first token has none, as in vLLM."""
    return None if prompt.logprobs is None else [None, *_rows(prompt.token_ids[1:], prompt.logprobs)]


def _rows(token_ids: list[int], logprobs: Logprobs) -> list[dict[int, Logprob]]:
    rows = []
    for position, token_id in enumerate(token_ids):
        best = enumerate(logprobs.alternatives(position), start=1)
        row = {alternative: Logprob(value, rank) for rank, (alternative, value) in best}
        row[token_id] = Logprob(logprobs.sampled[position], logprobs.ranks[position])
        rows.append(row)
    return rows
