"""How CPU time and memory grow with what a client asks for: `python -m bench.growth`, from the repository's root.

Each case is measured at an eighth, a quarter, a half and the whole of its size. What is told: CPU seconds of the daemon
(without its engine) and of this client, the most memory that the daemon had besides what it had before, and the
exponent of each between the smallest and the largest size: 1 is linear. Exits with 1 if an exponent is above 1.2.
"""

import argparse
import asyncio
import gc
import json
import math
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop
from safetensors.numpy import save_file

from bench import engines
from genserve.client import AsyncClient, Generation
from tests.support import models
from tests.support.daemon_process import DaemonProcess

CONTEXT = 33_000
SHARES = (8, 4, 2, 1)
MOST = 1.2
NOISE_S, NOISE_BYTES = 0.05, 4 << 20
"""What differs from run to run: less is not told from nothing."""
SAMPLE_S = 0.02
UNUSED = "model.layers.0.self_attn.rotary_emb.inv_freq"
"""A prefix of tensors that vLLM does not load, so that a small model has as many tensors as a large one."""

Measure = Callable[[AsyncClient, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one size."""

    daemon_s: float
    client_s: float
    memory_bytes: int

    def __str__(self) -> str:
        return f"daemon {self.daemon_s:.2f} s, client {self.client_s:.2f} s, {self.memory_bytes / 1e6:.1f} MB"


async def requests(client: AsyncClient, size: int) -> None:
    """Requests of 8 tokens on one stream."""
    prompts = [[1 + number % 500, 7, 1 + number // 500] for number in range(size)]
    generations = await client.generate_many(prompts, max_tokens=8, ignore_eos=True, text=False, timeout_s=None)
    require(len(generations) == size)


async def streamed_tokens(client: AsyncClient, size: int) -> None:
    """Tokens of one output, streamed with their text."""
    generation = Generation()
    async with client.stream([1, 2, 3], max_tokens=size, ignore_eos=True, timeout_s=None) as deltas:
        async for delta in deltas:
            generation.add(delta)
    require(len(generation.token_ids) == size and len(generation.text) > 0)


async def final_tokens(client: AsyncClient, size: int) -> None:
    """Tokens of one output with text and log-probabilities, in one message."""
    generation = await client.generate([1, 2, 3], max_tokens=size, ignore_eos=True, logprobs=0, timeout_s=None)
    require(len(generation.token_ids) == size and len(generation.text) > 0)


async def alternatives(client: AsyncClient, size: int) -> None:
    """Tokens in all, of 16 streams with 20 alternatives each."""
    async with client.stream_many(timeout_s=None) as many:
        generations = {
            await many.submit(
                [1, number], max_tokens=size // 16, ignore_eos=True, logprobs=20, stream_interval=1
            ): Generation()
            for number in range(16)
        }
        await many.done()
        async for item in many:
            require(item.delta is not None)
            generations[item.request_id].add(item.delta)  # type: ignore[arg-type]
    for generation in generations.values():
        logprobs = generation.sequences[0].logprobs
        require(logprobs is not None and len(logprobs.values) == 20 * (size // 16))


async def sequences(client: AsyncClient, size: int) -> None:
    """Sequences of one request, of 64 tokens each, read late."""
    generation = Generation()
    async with client.stream([1, 2, 3], n=size, max_tokens=64, ignore_eos=True, text=False, timeout_s=None) as deltas:
        async for delta in deltas:
            generation.add(delta)
            await asyncio.sleep(0.02)  # what is not read in time is merged
    require([len(each.token_ids) for each in generation.sequences] == [64] * size)


async def manifest(client: AsyncClient, size: int) -> None:
    """Tensors of a push that is validated."""
    tensors = {f"{UNUSED}.{number}": np.zeros(1, np.float32) for number in range(size)}
    await client.push_weights(tensors, version=2, action="validate", partial=True)


CASES: dict[str, tuple[Measure, int]] = {
    "requests": (requests, 4096),
    "streamed_tokens": (streamed_tokens, 32_000),
    "final_tokens": (final_tokens, 32_000),
    "alternatives": (alternatives, 16_384),
    "sequences": (sequences, 64),
    "manifest": (manifest, 45_000),
}
"""What is measured, and its largest size."""


def require(holds: bool) -> None:
    """Raises AssertionError for an answer that is not the whole one."""
    if not holds:
        raise AssertionError("the daemon's answer is not what was asked for")


async def cost(measure: Measure, client: AsyncClient, size: int, daemon: psutil.Process) -> Cost:
    """Of one measurement. The garbage of the one before is not in it."""
    gc.collect()
    own = psutil.Process()
    before_bytes = peak_bytes = private_bytes(daemon)
    before, own_before = cpu_s(daemon), cpu_s(own)
    running = asyncio.ensure_future(measure(client, size))
    while not running.done():
        await asyncio.wait([running], timeout=SAMPLE_S)
        peak_bytes = max(peak_bytes, private_bytes(daemon))
    await running
    return Cost(cpu_s(daemon) - before, cpu_s(own) - own_before, peak_bytes - before_bytes)


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of one process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def private_bytes(process: psutil.Process) -> int:
    """Memory that it shares with nobody."""
    info = process.memory_info()
    return int(info.rss - info.shared)


def exponent(sizes: list[int], values: list[float], noise: float) -> float | None:
    """That of the growth between the smallest and the largest size; None if the largest value is noise."""
    if values[-1] <= noise:
        return None
    return math.log(values[-1] / max(values[0], noise)) / math.log(sizes[-1] / sizes[0])


def checkpoint_with_unused(directory: Path, count: int) -> Path:
    """A tiny model with a long context, and tensors that it does not use."""
    checkpoint = models.tiny_qwen3(directory, max_position_embeddings=CONTEXT)
    weight_map = dict.fromkeys(models.load_tensors(checkpoint), "model.safetensors")
    unused = {f"{UNUSED}.{number}": np.zeros(1, np.float32) for number in range(count)}
    save_file(unused, directory / "unused.safetensors", metadata={"format": "pt"})
    weight_map |= dict.fromkeys(unused, "unused.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return checkpoint


async def main(names: list[str], divisor: int) -> int:
    """Measures these cases; the exit status."""
    num_unused = CASES["manifest"][1] if "manifest" in names else 1
    superlinear: list[str] = []
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = checkpoint_with_unused(directory / "checkpoint", num_unused)
        flags = ["--model", str(checkpoint), *engines.flags(max_model_len=CONTEXT), "--max-logprobs", "20"]
        daemon = DaemonProcess(flags, directory / "stderr", engines.ENVIRONMENT)
        stack.push_async_callback(asyncio.to_thread, daemon.stop)
        await asyncio.to_thread(daemon.wait_serving)
        process = psutil.Process(daemon.process.pid)
        client = await stack.enter_async_context(AsyncClient(daemon.address))
        for name in names:
            measure, largest = CASES[name]
            sizes = [max(largest // divisor // share, 1) for share in SHARES]
            await measure(client, sizes[0])  # what is made once
            costs = []
            for size in sizes:
                costs.append(await cost(measure, client, size, process))
                print(f"{name:16} {size:>7,}: {costs[-1]}", flush=True)
            columns: dict[str, tuple[list[float], float]] = {
                "daemon_s": ([each.daemon_s for each in costs], NOISE_S),
                "client_s": ([each.client_s for each in costs], NOISE_S),
                "memory_bytes": ([each.memory_bytes for each in costs], NOISE_BYTES),
            }
            found = {column: exponent(sizes, values, noise) for column, (values, noise) in columns.items()}
            told = (f"{column} {'-' if each is None else f'{each:.2f}'}" for column, each in found.items())
            print(f"{name:16} exponents: {', '.join(told)}", flush=True)
            superlinear += [f"{name} {column}" for column, each in found.items() if each is not None and each > MOST]
    for each in superlinear:
        print(f"grows faster than its size: {each}", file=sys.stderr)
    return 1 if superlinear else 0


def arguments() -> Any:
    """The command line's."""
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="which ones, separated by commas; default: all")
    parser.add_argument("--divisor", type=int, default=1, help="divides every size, for a quick look; default: 1")
    args = parser.parse_args()
    names = args.cases.split(",")
    if unknown := set(names) - CASES.keys():
        parser.error(f"no case is called {min(unknown)!r}; they are {', '.join(CASES)}")
    args.cases = names
    return args


if __name__ == "__main__":
    given = arguments()
    raise SystemExit(uvloop.run(main(given.cases, given.divisor)))
