"""Orders to the worker of a plain AsyncLLM: run as a program, prints one JSON list with the answers.

    python -m tests.engine.trap CHECKPOINT STEPS_JSON

A step is [method of `Trap`, *arguments], or ["generate", *token_ids]. One that raises answers {"error": ...}, and the
next one follows. Of genserve, only the digests and the in-place update take part.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.reference import MAX_TOKENS
from tests.support.warm import process

Tensors = Iterator[tuple[str, torch.Tensor]]
Faults = dict[str, Any]
"""`before` (a tensor's name): the source raises there; `lacks`: the source has no such tensor; `misshapen`: that tensor
has one row less; `loading`, `processing`, `put`: so many tensors are loaded, layers post-processed, or values put in
place, and the next one fails."""


def run_steps(checkpoint: Path, steps: list[list[Any]]) -> list[Any]:
    """The answers to the steps, from an engine of its own."""
    program = [sys.executable, "-m", "tests.engine.trap", str(checkpoint), json.dumps(steps, default=str)]
    done = process.run(program, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stderr[-4000:]
    answers: list[Any] = json.loads(lines[0].removeprefix("ANSWERS "))
    return answers


class Trap:
    """Worker extension: vLLM's own reload and genserve's in-place update, with failures on order."""

    vllm_config: Any
    device: Any
    model_runner: Any
    reload_weights: Any

    def digests(self) -> dict[str, str]:
        """SHA-256 of the live weights, by name."""
        from genserve.worker.model.digests import weight_digests

        return weight_digests(self.model_runner.get_model())

    def reload(self, checkpoint: str, faults: Faults) -> None:
        """vLLM's reload in place from a source of tensors."""
        self.reload_weights(weights_iterator=_tensors(checkpoint, faults))

    def attach(self) -> None:
        """Builds genserve's in-place update."""
        from genserve.worker.update.device import Device
        from genserve.worker.update.inplace import InPlaceUpdate

        model = self.model_runner.get_model()
        self._update = InPlaceUpdate(model, self.vllm_config, Device.of(self.device))

    def prepare(self, checkpoint: str, faults: Faults) -> None:
        """genserve's rehearsal of an in-place update."""
        with _ordered(faults):
            self._update.prepare(_tensors(checkpoint, faults), Event())

    def commit(self, faults: Faults) -> int:
        """genserve's in-place update; the most bytes of weights that it held at a time."""
        with _ordered(faults) as held_bytes:
            self._update.commit()
        return max(held_bytes)

    def rollback(self) -> None:
        """genserve's way back, where there is one."""
        self._update.rollback()


@contextmanager
def _ordered(faults: Faults) -> Iterator[list[int]]:
    """In-place updates fail as ordered; the sizes of what was loaded whenever something was post-processed."""
    from genserve.worker.update import shadow
    from genserve.worker.update.exchange import PointerExchange
    from genserve.worker.update.shadow import Shadow

    load, process, put = Shadow.load, shadow.process_weights_after_loading, PointerExchange._put
    held_bytes: list[int] = []
    num_loaded = num_put = 0

    def faulty_load(self: Any, tensors: Any, **options: Any) -> Any:
        class Counted:
            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                nonlocal num_loaded
                for item in tensors:
                    if num_loaded == faults.get("loading"):
                        raise RuntimeError("ordered to fail in loading")
                    num_loaded += 1
                    yield item

        return load(self, Counted(), **options)

    def faulty_process(model: Any, *args: Any) -> None:
        if len(held_bytes) == faults.get("processing"):
            raise RuntimeError("ordered to fail in post-processing")
        held_bytes.append(sum(parameter.nbytes for parameter in model._whole[0].parameters()))
        process(model, *args)

    def faulty_put(self: Any, entry: Any, value: Any) -> None:
        nonlocal num_put
        if num_put == faults.get("put"):
            raise RuntimeError("ordered to fail in the exchange")
        num_put += 1
        put(self, entry, value)

    Shadow.load, PointerExchange._put = faulty_load, faulty_put  # type: ignore[method-assign]
    shadow.process_weights_after_loading = faulty_process
    try:
        yield held_bytes
    finally:
        Shadow.load, PointerExchange._put = load, put  # type: ignore[method-assign]
        shadow.process_weights_after_loading = process


def _tensors(checkpoint: str, faults: Faults) -> Tensors:
    for shard in sorted(Path(checkpoint).glob("*.safetensors")):
        for name, tensor in sorted(load_file(shard).items()):
            if name == faults.get("before"):
                raise RuntimeError(f"ordered to fail before {name}")
            if name != faults.get("lacks"):
                yield name, tensor[:-1] if name == faults.get("misshapen") else tensor


async def _run(checkpoint: str, steps: list[list[Any]]) -> list[Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=checkpoint,
        max_model_len=2048,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,  # what was computed under other weights
        worker_extension_cls="tests.engine.trap.Trap",
    )
    llm = AsyncLLM.from_engine_args(args)
    greedy = SamplingParams(
        temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def answer(number: int, method: str, *arguments: Any) -> Any:
        if method == "generate":
            outputs = llm.generate({"prompt_token_ids": list(arguments)}, greedy, f"r{number}")
            return [output.outputs[0].token_ids async for output in outputs].pop()
        return (await llm.collective_rpc(method, args=arguments))[0]

    answers: list[Any] = []
    for number, step in enumerate(steps):
        try:
            answers.append(await answer(number, *step))
        except Exception as error:
            answers.append({"error": str(error)})
    llm.shutdown()
    return answers


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    print("ANSWERS " + json.dumps(asyncio.run(_run(sys.argv[1], json.loads(sys.argv[2])))), flush=True)
elif torch.cpu._is_amx_tile_supported():
    # In a worker: bf16 attention dies with SIGILL in a process that has not asked the kernel for AMX tiles.
    torch.cpu._init_amx()
