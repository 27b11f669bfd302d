"""The main job in one go: a daemon on a real model, long streams, and new weights pushed while they run.

    scripts/demo                                     # sets everything up and runs this
    python clients/python/quickstart.py --target HOST:PORT --model DIRECTORY    # against a daemon of your own

Exits with 1 unless the version switches inside the streams and the original weights give the first answer again.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

import genserve
from genserve.client import AsyncClient, Generation, PushResult
from genserve.errors import GenserveError
from genserve.launcher import DaemonFailedError

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORIES = [f"Chapter {i}. Once upon a time, in a land far away," for i in range(1, 9)]
NOISE = 0.1
"""Strength of the change to the weights, relative to each tensor's root mean square."""
WIDTH = 48


def run() -> int:
    """Runs the demo; the exit status. What a daemon has failed with is told in a few lines."""
    try:
        return asyncio.run(main())
    except (DaemonFailedError, GenserveError) as error:
        # The notes are from genserve.launch: how the daemon has ended, and where its log is.
        causes = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
        print("\n== The demo has failed", *causes, sep="\n  ", file=sys.stderr)
        return 1


async def main() -> int:
    """Shows everything; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a running daemon; default: start one on the built-in model")
    parser.add_argument("--model", type=Path, help="directory of the checkpoint that it serves; needed with --target")
    options = parser.parse_args()
    if (options.target is None) != (options.model is None):
        parser.error("--target and --model go together")
    if options.target is not None:
        return await show(options.target, options.model)
    step("Starting a daemon: genserve.launch(max_model_len=2048). It takes a minute, and longer the first time")
    async with genserve.launch(max_model_len=2048) as server:
        say(f"serving {server.model} on {server.address}")
        return await show(server.address, Path(server.model))


async def show(target: str, model: Path) -> int:
    """The demo against a daemon; 0 if everything was as it should be."""
    async with AsyncClient(target) as client:
        version = (await client.get_weights()).weight_version

        step("A chat answer, streamed")
        first = await answer(client)

        changed_weights = noisy(load_tensors(model))
        step(f"{len(STORIES)} long streams start; weights version {version + 1} is pushed while they run")
        streams = [asyncio.create_task(story(client, prompt)) for prompt in STORIES]
        try:
            await asyncio.sleep(1)
            report(await client.push_weights(changed_weights, version=version + 1))
            stories = [await stream for stream in streams]
        finally:  # after a failure the others fail too, or would run on
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
        say("")
        for index, (generation, longest_gap_s) in enumerate(stories, 1):
            say(f"stream {index}  {picture(generation)}  longest wait for a token {1000 * longest_gap_s:4.0f} ms")
        say("(a wait holds the exchange, and then the prefill of all streams again: KV policy RECOMPUTE, the default)")
        switched = all(len(generation.sequences[0].weight_spans) == 2 for generation, _ in stories)

        step("The same question under the changed weights")
        changed = await answer(client)

        step(f"The original weights are pushed back as version {version + 2}")
        report(await client.push_weights(model, version=version + 2))
        again = await answer(client)

    step("Outcome")
    checks = {
        "every stream began under one version and ended under the next": switched,
        "the changed weights gave another answer": changed.token_ids != first.token_ids,
        "the original weights gave the first answer again, token for token": again.token_ids == first.token_ids,
    }
    for name, holds in checks.items():
        say(f"{'yes' if holds else 'NO '}  {name}")
    return 0 if all(checks.values()) else 1


async def answer(client: AsyncClient) -> Generation:
    """Streams the greedy answer to the question onto the terminal."""
    generation, started = Generation(), time.perf_counter()
    print(f"  {QUESTION[0]['content']}\n  > ", end="", flush=True)
    async for delta in client.stream(QUESTION, temperature=0.0, max_tokens=32):
        generation.add(delta)
        print(delta.text.replace("\n", " "), end="", flush=True)
    seconds = time.perf_counter() - started
    print(f"\n  ({len(generation.token_ids)} tokens, {len(generation.token_ids) / seconds:.0f} tokens/s)", flush=True)
    return generation


async def story(client: AsyncClient, prompt: str) -> tuple[Generation, float]:
    """A long stream, and the longest time between two of its messages in seconds."""
    generation, last, longest = Generation(), 0.0, 0.0
    async for delta in client.stream(prompt, temperature=0.8, seed=1, max_tokens=512, ignore_eos=True):
        now = time.perf_counter()
        longest = max(longest, now - last) if last else 0.0
        last = now
        generation.add(delta)
    return generation, longest


def load_tensors(model: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint directory."""
    return {name: tensor for shard in sorted(model.glob("*.safetensors")) for name, tensor in load_file(shard).items()}


def noisy(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as after some rather careless training."""
    torch.manual_seed(0)
    return {
        name: tensor + NOISE * tensor.float().square().mean().sqrt().to(tensor.dtype) * torch.randn_like(tensor)
        for name, tensor in tensors.items()
    }


def report(result: PushResult) -> None:
    """What a push took, step by step."""
    applied = result.applied
    assert applied is not None
    say(f"{result.push.total_bytes / 1e6:.0f} MB, version {applied.previous_version} -> {applied.active_version}:")
    say("   ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in applied.step_s.items()))
    paused = f"{1000 * applied.paused_s:.0f} ms" if applied.paused_s > 0 else "by somebody else"
    requests = f"{applied.requests_kept} requests went on, {applied.requests_aborted} were ended"
    say(f"generation was paused for {paused}; {requests}")


def picture(generation: Generation) -> str:
    """The spans of a stream as a bar, one letter a version."""
    spans = generation.sequences[0].weight_spans
    total = spans[-1].end
    bar = "".join(str(span.version % 10) * round(WIDTH * (span.end - span.start) / total) for span in spans)
    words = ", ".join(f"v{span.version} [{span.start}, {span.end})" for span in spans)
    return f"{bar:<{WIDTH}.{WIDTH}}  {words:<28}"


def step(title: str) -> None:
    """Announces the next part."""
    print(f"\n== {title}", flush=True)


def say(line: str) -> None:
    """Prints a line of it."""
    print(f"  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(run())
