"""Weight updates as they are done without genserve, on a plain AsyncLLM: run as a program, obeys lines of JSON.

    python -m bench.updates.naive_engine CHECKPOINT [vLLM's flags]

A line {"do": "update", "way": "collective_rpc" | "tmpfs", "weights": CHECKPOINT, "streams": n} starts n endless
streams, updates the weights while they run, and answers with one line of JSON: seconds by step and the longest wait for
a token of any stream (0 without one). {"do": "cycle", "plan": …} updates again and again, and answers with a `Window`.
Nothing of genserve takes part.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bench import engines
from bench.processes import obey
from bench.updates.window import Plan, Window

TMPFS = "/dev/shm"
WARM_UP_S = 2.0


class Receiver:
    """Worker extension: takes tensors as bytes."""

    reload_weights: Any

    def receive(self, name: str, dtype: str, shape: list[int], data: bytes) -> None:
        """Keeps one tensor."""
        tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).view(shape)
        vars(self).setdefault("_received", []).append((name, tensor))

    def load_received(self) -> None:
        """Loads what was kept, with vLLM's layerwise reload."""
        self.reload_weights(weights_iterator=iter(vars(self).pop("_received")))


async def main(checkpoint: str, *more: str) -> None:
    """Starts the engine and obeys."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    extension = "bench.updates.naive_engine.Receiver"
    flags = ["--model", checkpoint, *engines.flags(), *more, "--worker-extension-cls", extension]
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(parser.parse_args(flags)))
    tensors: dict[str, dict[str, torch.Tensor]] = {}

    async def carry_out(do: str, **order: Any) -> Any:
        return await (cycle(llm, tensors, **order) if do == "cycle" else update(llm, **order))

    await obey(carry_out)
    llm.shutdown()


async def update(llm: Any, way: str, weights: str, streams: int) -> dict[str, float]:
    """One update among live streams."""
    waits: list[float] = []
    running = [asyncio.create_task(stream(llm, f"{way}-{time.monotonic()}-{i}", i, waits)) for i in range(streams)]
    tensors = await asyncio.to_thread(load_file, Path(weights) / "model.safetensors")
    await asyncio.sleep(WARM_UP_S if streams else 0)
    waits.clear()
    steps = await WAYS[way](llm, tensors)
    await asyncio.sleep(WARM_UP_S if streams else 0)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return {**steps, "longest_wait_s": max(waits, default=0.0)}


async def stream(llm: Any, request_id: str, seed: int, waits: list[float]) -> None:
    """An endless greedy stream; appends how long it waited for each token."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    last = time.monotonic()
    async for _ in llm.generate({"prompt_token_ids": [seed + 1, 7, 9]}, params, request_id):
        now = time.monotonic()
        waits.append(now - last)
        last = now


async def through_collective_rpc(llm: Any, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Every tensor as bytes through collective_rpc, paused throughout, as nothing may sample from half of them."""
    began = time.monotonic()
    await llm.pause_generation(mode="keep", clear_cache=True)
    for name, tensor in tensors.items():
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        await llm.collective_rpc("receive", args=(name, str(tensor.dtype)[6:], list(tensor.shape), data))
    await llm.collective_rpc("load_received")
    await llm.resume_generation()
    return {"total_s": time.monotonic() - began, "paused_s": time.monotonic() - began}


async def through_tmpfs(llm: Any, tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """The trainer saves to memory that the worker can read, and the worker reloads from there, paused."""
    with tempfile.TemporaryDirectory(dir=TMPFS) as directory:
        began = time.monotonic()
        await asyncio.to_thread(save_file, tensors, Path(directory) / "model.safetensors")
        saved = time.monotonic()
        await llm.pause_generation(mode="keep", clear_cache=True)
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})
        await llm.resume_generation()
        done = time.monotonic()
    return {"total_s": done - began, "save_s": saved - began, "paused_s": done - saved}


WAYS: dict[str, Callable[[Any, dict[str, torch.Tensor]], Awaitable[dict[str, float]]]] = {
    "collective_rpc": through_collective_rpc,
    "tmpfs": through_tmpfs,
}


async def cycle(llm: Any, loaded: dict[str, dict[str, torch.Tensor]], plan: dict[str, Any]) -> dict[str, Any]:
    """Updates at the times of a `Plan` while streams run."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    wanted = Plan(**plan)
    if wanted.way is not None:
        for checkpoint in wanted.checkpoints:
            if checkpoint not in loaded:
                loaded[checkpoint] = await asyncio.to_thread(load_file, Path(checkpoint) / "model.safetensors")
    window = Window(num_streams=wanted.num_streams)
    version = 0

    async def stream(slot: int) -> None:
        for prompt in wanted.prompts(slot):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=wanted.max_tokens,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
                detokenize=False,
            )
            request_id = f"cycle-{time.monotonic()}-{slot}"
            async for output in llm.generate({"prompt_token_ids": prompt}, params, request_id):
                window.arrivals[slot].append((time.monotonic(), len(output.outputs[0].token_ids), version))

    async def push(number: int) -> None:
        nonlocal version
        assert wanted.way is not None
        await WAYS[wanted.way](llm, loaded[wanted.checkpoints[number % len(wanted.checkpoints)]])
        version += 1  # what comes from now on was sampled after the reload

    running = [asyncio.create_task(stream(slot)) for slot in range(wanted.num_streams)]
    try:
        await window.carry_out(wanted, push)
    finally:
        for task in running:
            task.cancel()
        ends = await asyncio.gather(*running, return_exceptions=True)
    for error in ends:
        if not isinstance(error, asyncio.CancelledError):
            raise RuntimeError("a stream ended") from error
    return asdict(window)


if __name__ == "__main__":
    import uvloop

    os.environ.update(engines.ENVIRONMENT)
    uvloop.run(main(*sys.argv[1:]))
