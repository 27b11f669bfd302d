"""What plain vLLM says about a checkpoint: run as a program, prints one JSON object.

    python -m tests.support.reference CHECKPOINT PROMPTS_JSON [TENSOR_PARALLEL_SIZE]

Greedy continuations with log-probabilities from AsyncLLM in process, one prompt at a time, vLLM's weight checksums, and
digests of the live weights. Nothing of genserve takes part but the digests.
"""

import asyncio
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from genserve.memory.host import ProcessIdentity

MAX_TOKENS = 12
NUM_LOGPROBS = 3


async def describe(checkpoint: str, prompts: list[list[int]], tensor_parallel_size: int) -> dict[str, Any]:
    """The reference for one checkpoint."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=checkpoint,
        max_model_len=2048,
        kv_cache_memory_bytes=64 << 20,
        tensor_parallel_size=tensor_parallel_size,
        enforce_eager=True,
        worker_extension_cls="genserve.worker.extension.WeightExchangeExtension",
    )
    llm = AsyncLLM.from_engine_args(args)
    outputs = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            logprobs=NUM_LOGPROBS,
            prompt_logprobs=NUM_LOGPROBS,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for output in llm.generate({"prompt_token_ids": prompt}, params, f"r{i}"):
            sequence = output.outputs[0]
            assert sequence.logprobs is not None and output.prompt_logprobs is not None
            outputs.append(
                {
                    "text": sequence.text,
                    "token_ids": list(sequence.token_ids),
                    "sampled": [
                        row[token].logprob for row, token in zip(sequence.logprobs, sequence.token_ids, strict=True)
                    ],
                    "alternatives": [_alternatives(row) for row in sequence.logprobs],
                    "prompt_sampled": [
                        row[token].logprob
                        for row, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
                        if row is not None
                    ],
                }
            )
    daemon = asdict(ProcessIdentity.own())
    attach = {"report_socket": "\0unused", "cpus": sorted(os.sched_getaffinity(0)), "daemon": daemon}
    await llm.collective_rpc("genserve_attach", args=(attach,))
    digests = await llm.collective_rpc("genserve_digests", args=({"budget_s": 3600.0},))
    checksums = await llm.compute_weight_checksums()
    llm.shutdown()
    return {
        "outputs": outputs,
        "checksums": {name: value for rank in checksums for name, value in rank.items()},
        "digests": {f"{d['rank']} {name}": value for d in digests for name, value in d["tensors"].items()},
    }


def _alternatives(row: Any) -> list[tuple[int, float]]:
    ranked = sorted(((p.rank, token, p.logprob) for token, p in row.items()), key=lambda item: item[0])
    return [(token, logprob) for _, token, logprob in ranked[:NUM_LOGPROBS]]


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    size = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    result = asyncio.run(describe(sys.argv[1], json.loads(sys.argv[2]), size))
    print("REFERENCE " + json.dumps(result), flush=True)
