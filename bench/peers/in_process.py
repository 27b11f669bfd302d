"""The ceiling: AsyncLLM in one process with the coroutines that measure it, and nothing in between.

Also the program: `python -m bench.peers.in_process CHECKPOINT [vLLM's flags]` obeys lines of JSON.
"""

import gc
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

from bench import engines
from bench.processes import Program, obey
from bench.traces import Trace, Work, closed_loop


class InProcess:
    """The program, seen from the harness."""

    peers: ClassVar[tuple[str, ...]] = ("in_process", "in_process_final")
    without_text: ClassVar[tuple[str, ...]] = ()
    is_own_client: ClassVar[bool] = True
    pid = 0
    _program: Program

    async def start(self, checkpoint: Path, directory: Path, stack: AsyncExitStack, flags: Sequence[str] = ()) -> None:
        """Starts the program and its engine."""
        log = directory / "in_process.log"
        self._program = Program.of_module(
            "in_process", __name__, str(checkpoint), *flags, log=log, env=engines.ENVIRONMENT
        )
        stack.callback(self._program.stop)
        self.pid = self._program.pid
        await self._program.wait_ready()

    async def generate(self, peer: str, work: Work) -> list[Trace]:
        """Has it measured there."""
        order = {"prompts": work.prompts, "concurrency": work.concurrency, "max_tokens": work.max_tokens}
        answer = await self._program.order(**order, final_only=work.final_only, outputs=work.outputs)
        return [Trace(*trace) for trace in answer]


async def main(checkpoint: str, *flags: str) -> None:
    """Starts the engine and obeys."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", checkpoint, *engines.flags(), *flags]))
    llm = AsyncLLM.from_engine_args(args)
    gc.collect()
    gc.freeze()  # as vLLM's servers and genserve's daemon do once they have started
    num_runs = 0

    async def carry_out(**order: Any) -> list[tuple[float, list[float], list[int], list[float], list[str]]]:
        nonlocal num_runs
        num_runs += 1
        work = Work(**order)
        kind = RequestOutputKind.FINAL_ONLY if work.final_only else RequestOutputKind.DELTA

        async def stream(number: int, prompt: list[int]) -> Trace:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=work.max_tokens,
                ignore_eos=True,
                output_kind=kind,
                detokenize=work.text,
                logprobs=0 if work.logprobs else None,
                flat_logprobs=work.logprobs,
            )
            trace = Trace(time.monotonic())
            async for output in llm.generate({"prompt_token_ids": prompt}, params, f"{num_runs}-{number}"):
                (sequence,) = output.outputs
                if sequence.token_ids:
                    trace.arrived_at.append(time.monotonic())
                    trace.token_ids += sequence.token_ids
                    if work.logprobs:
                        flat: Any = sequence.logprobs
                        trace.logprobs += [flat.logprobs[start] for start in flat.start_indices]
                    if work.text:
                        trace.texts.append(sequence.text)
            return trace

        traces = await closed_loop(work, stream)
        return [(each.sent_at, each.arrived_at, each.token_ids, each.logprobs, each.texts) for each in traces]

    await obey(carry_out)
    llm.shutdown()


if __name__ == "__main__":
    import uvloop

    os.environ.update(engines.ENVIRONMENT)
    uvloop.run(main(*sys.argv[1:]))
