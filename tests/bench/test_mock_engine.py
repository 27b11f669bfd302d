"""What `scripts/bench serving` measures is the server only if the engine does what it says."""

from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from bench import engines
from bench.measurements.serving import FLAGS
from bench.peers.in_process import InProcess
from bench.traces import Work

PACE_MS = 40


@pytest.mark.long("bench", "genserve/rpc", "genserve/engine/vllm/requests")
async def test_the_mock_engine_gives_every_request_a_token_per_step(tmp_path: Path) -> None:
    """The same ones to whoever asks, with log-probabilities if they are asked for, and not faster than told."""
    async with AsyncExitStack() as stack:
        server = InProcess()
        await server.start(engines.model("tiny", tmp_path), tmp_path, stack, FLAGS)
        prompts = [[PACE_MS, 1, 7], [PACE_MS, 2, 398]]
        for outputs in ("tokens", "logprobs"):
            traces = await server.generate("in_process", Work(prompts, 2, max_tokens=4, outputs=outputs))
            assert [each.token_ids for each in traces] == [[8, 9, 10, 11], [399, 400, 1, 2]]
            assert [each.logprobs for each in traces] == [[] if outputs == "tokens" else [-1.0] * 4] * 2
            for trace in traces:
                took_s = trace.arrived_at[-1] - trace.sent_at
                assert took_s >= 4 * PACE_MS / 1000, list(pairwise(trace.arrived_at))
