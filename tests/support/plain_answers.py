"""What plain vLLM answers to requests, one at a time: run as a program, nothing of genserve takes part.

    python -m tests.support.plain_answers CHECKPOINT < CASES_JSON

A case has `prompt` (token ids) and `options`, named as in vLLM's SamplingParams. Prints a JSON object for each answer.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genserve.client import GeneratedSequence, Generation, Logprobs
from genserve.client.generation.results import Finish, Prompt
from tests.support.warm import process

_BEGIN = "ANSWER "


def plain_answers(checkpoint: Path, cases: Sequence[dict[str, Any]], asked: Path) -> list[Generation]:
    """The answers of an engine of its own, in float32, as our client would give them. `asked`: a file to write."""
    asked.write_text(json.dumps(list(cases)))
    command = [sys.executable, "-m", "tests.support.plain_answers", str(checkpoint)]
    with asked.open() as stdin:
        done = process.run(command, timeout=900, stdin=stdin)
    lines = [line.removeprefix(_BEGIN) for line in done.stdout.splitlines() if line.startswith(_BEGIN)]
    assert len(lines) == len(cases), done.stderr[-4000:]
    return [_generation(case, json.loads(line)) for case, line in zip(cases, lines, strict=True)]


def _generation(case: dict[str, Any], answer: dict[str, Any]) -> Generation:
    width = case["options"].get("prompt_logprobs")
    logprobs = _logprobs(answer["prompt"], width) if width is not None else None
    sequences = [
        GeneratedSequence(
            index,
            token_ids=sequence["token_ids"],
            logprobs=_logprobs(sequence["rows"], case["options"]["logprobs"]) if sequence["rows"] is not None else None,
            finish=Finish(sequence["reason"], None, None, len(sequence["token_ids"]), [], None),
        )
        for index, sequence in enumerate(answer["sequences"])
    ]
    return Generation(prompt=Prompt(len(case["prompt"]), 0, [], logprobs), sequences=sequences)


def _logprobs(rows: list[dict[str, Any]], width: int) -> Logprobs:
    """Of rows with the token and all that vLLM tells of its position, as (rank, token, log-probability)."""
    found = Logprobs(width=width)
    for row in rows:
        ((rank, _, value),) = (each for each in row["all"] if each[1] == row["token"])
        found.sampled.append(value)
        found.ranks.append(rank)
        likeliest = sorted(row["all"])[:width]
        found.token_ids += [token for _, token, _ in likeliest]
        found.values += [value for _, _, value in likeliest]
    return found


async def answer(checkpoint: str, cases: list[dict[str, Any]]) -> None:
    """Prints the answers."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=checkpoint, max_model_len=2048, kv_cache_memory_bytes=64 << 20, dtype="float32", enforce_eager=True
    )
    llm = AsyncLLM.from_engine_args(args)
    for number, case in enumerate(cases):
        options = case["options"]
        if "logit_bias" in options:  # JSON's names are strings
            options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
        params = SamplingParams(**options, output_kind=RequestOutputKind.FINAL_ONLY)
        async for output in llm.generate({"prompt_token_ids": case["prompt"]}, params, str(number)):
            told = {
                "prompt": _rows(case["prompt"][1:], (output.prompt_logprobs or [None])[1:]),
                "sequences": [
                    {
                        "token_ids": list(each.token_ids),
                        "reason": each.finish_reason,
                        "rows": None if each.logprobs is None else _rows(each.token_ids, each.logprobs),
                    }
                    for each in output.outputs
                ],
            }
        print(_BEGIN + json.dumps(told), flush=True)
    llm.shutdown()


def _rows(tokens: Sequence[int], rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {"token": token, "all": [(each.rank, other, each.logprob) for other, each in row.items()]}
        for token, row in zip(tokens, rows, strict=False)  # a prompt has none unless asked for
    ]


if __name__ == "__main__":
    asyncio.run(answer(sys.argv[1], json.load(sys.stdin)))
