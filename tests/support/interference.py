"""Whether requests change each other's answers: random ones, alone and all at once, beside others that are absurd."""

import asyncio
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from genserve.client import AsyncClient, Generation, Logprobs
from genserve.errors import GenserveError

VOCABULARY: Final = 500
TOLERANCE: Final = 1e-3
"""Of log-probabilities: float32, computed in another order in a larger batch."""
BATCH: Final = 20
_NUM_BESIDE: Final = 4
_FEW_TOKENS: Final = (1, 3, 8, 20)


@dataclass(frozen=True)
class Case:
    """A request with one right answer."""

    prompt: list[int]
    options: dict[str, Any]


class Cases:
    """An endless supply, the same one for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def batch(self, size: int) -> list[Case]:
        """Requests that have one answer each: greedy or with a seed."""
        return [self._case() for _ in range(size)]

    def poison(self) -> Case:
        """One that asks for what few ask for, or for what is refused. Its answer is its own matter."""
        prompt = self._ids(self._random.choice((1, 7, 300)))
        absurd: Sequence[dict[str, Any]] = (
            {"logprobs": 2, "engine_params": {"logprob_token_ids": [3, 4, 5]}},
            {"engine_params": {"logprob_token_ids": [3]}},
            {"logprobs": 20},
            {"prompt_logprobs": 20, "engine_params": {"skip_reading_prefix_cache": False}},
            {"prompt_logprobs": 5, "logprobs": 0},
            {"logit_bias": {each: -100.0 for each in range(VOCABULARY - 1)}},
            {"allowed_token_ids": [7]},
            {"bad_words": ["a", "e", "i"], "min_tokens": 5},
            {"repetition_penalty": 50.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
            {"regex": "(a|b){3}", "n": 8},
            {"temperature": 5.0, "top_p": 0.01, "min_p": 0.9, "n": 16},
            {"engine_params": {"repetition_detection": {"max_pattern_size": 1, "min_count": 2}}},
            {"time_budget_s": 0.01},
        )
        return Case(prompt, {"max_tokens": 30, "ignore_eos": True, **self._random.choice(absurd)})

    def _case(self) -> Case:
        options: dict[str, Any] = {"max_tokens": self._random.choice(_FEW_TOKENS), "ignore_eos": True, "text": False}
        options["temperature"] = self._random.choice((0.0, 0.0, 1.0, 2.0))
        if options["temperature"]:
            options["seed"] = self._random.randrange(1 << 31)
        for name, values in {
            "logprobs": (0, 1, 5, 20),
            "prompt_logprobs": (0, 3),
            "top_k": (1, 5, 50),
            "top_p": (0.5, 0.9),
            "min_p": (0.1,),
            "presence_penalty": (-2.0, 1.0),
            "frequency_penalty": (0.5,),
            "repetition_penalty": (1.5,),
            "min_tokens": (1,),
            "n": (2, 3),
            "allowed_token_ids": (self._ids(40),),
            "logit_bias": ({each: self._random.uniform(-5, 5) for each in self._ids(10)},),
            "engine_params": ({"skip_reading_prefix_cache": True},),
        }.items():
            if self._random.random() < 0.25:
                options[name] = self._random.choice(values)
        if not options["temperature"]:
            options.pop("n", None)  # vLLM refuses it
        return Case(self._ids(self._random.choice((1, 2, 20, 70))), options)

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]


async def alone(client: AsyncClient, cases: Sequence[Case]) -> list[Generation]:
    """Their answers, one after the other."""
    return [await client.generate(case.prompt, **case.options) for case in cases]


async def together(client: AsyncClient, cases: Sequence[Case], beside: Sequence[Case]) -> list[Generation]:
    """Their answers, all at once, `beside` others, while the engine is paused and resumed."""

    async def bear(case: Case) -> None:
        with suppress(GenserveError):
            await client.generate(case.prompt, **case.options)

    async def pause() -> None:
        while True:
            async with client.paused():
                pass

    others = [asyncio.create_task(bear(each)) for each in beside]
    pausing = asyncio.create_task(pause())
    try:
        return await asyncio.gather(*(client.generate(case.prompt, **case.options) for case in cases))
    finally:
        pausing.cancel()
        await asyncio.gather(pausing, *others, return_exceptions=True)


async def interferences(client: AsyncClient, cases: Cases, count: int) -> list[str]:
    """What differs when so many requests run together, in batches, instead of alone; nothing should."""
    found: list[str] = []
    for _ in range(0, count, BATCH):
        batch = cases.batch(BATCH)
        expected = await alone(client, batch)
        answers = await together(client, batch, [cases.poison() for _ in range(_NUM_BESIDE)])
        for case, one, other in zip(batch, expected, answers, strict=True):
            found += differences(case, one, other)
    return found


def differences(case: Case, expected: Generation, found: Generation) -> list[str]:
    """What differs between two answers to a request; nothing should."""
    told = [
        *_of_logprobs("prompt", expected.prompt and expected.prompt.logprobs, found.prompt and found.prompt.logprobs)
    ]
    if len(expected.sequences) != len(found.sequences):
        return [*told, f"{len(found.sequences)} sequences instead of {len(expected.sequences)}"]
    for index, (one, other) in enumerate(zip(expected.sequences, found.sequences, strict=True)):
        if one.token_ids != other.token_ids:
            told.append(f"[{index}] tokens {other.token_ids} instead of {one.token_ids}")
        assert one.finish is not None and other.finish is not None
        if one.finish.reason != other.finish.reason:
            told.append(f"[{index}] ended by {other.finish.reason} instead of {one.finish.reason}")
        told += _of_logprobs(f"[{index}]", one.logprobs, other.logprobs)
    return [f"{each}: {case}" for each in told]


def _of_logprobs(where: str, one: Logprobs | None, other: Logprobs | None) -> Iterator[str]:
    if one is None or other is None:
        if one is not other:
            yield f"{where} log-probabilities only once"
        return
    if (one.width, len(one.sampled)) != (other.width, len(other.sampled)):
        yield f"{where} {len(other.sampled)} rows of {other.width} instead of {len(one.sampled)} of {one.width}"
        return
    for row in range(len(one.sampled)):
        if not _near(one.sampled[row], other.sampled[row]):
            yield f"{where} log-probability {row}: {other.sampled[row]} instead of {one.sampled[row]}"
        for (token, value), (token_too, value_too) in zip(one.alternatives(row), other.alternatives(row), strict=True):
            # Two that are as likely may change places.
            if not _near(value, value_too) or (token != token_too and not _is_tied(one, row, value)):
                yield f"{where} alternative of {row}: {token_too} {value_too} instead of {token} {value}"


def _is_tied(of: Logprobs, row: int, value: float) -> bool:
    values = [each for _, each in of.alternatives(row)]
    return sum(_near(value, each) for each in values) > 1 or _near(value, values[-1])  # the next one is not there


def _near(one: float, other: float) -> bool:
    return one == other or math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
