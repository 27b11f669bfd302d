"""One request through the whole path before anybody else may send one: from its token ids to tokens of an update.

vLLM's own warm-up takes another way, and on a CPU hardly any. An engine that cannot take a step would say so to the
first request of anybody, by ending.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from genserve.engine.generation import GenerationRequest, Stop, TokenPrompt
from genserve.engine.protocol import GenerationStream

_TOKEN = 0
"""What vLLM's warm-up has, too: every vocabulary has it, and no model takes it for an image."""
_NUM_PROMPT_TOKENS = 4
"""Computed at once, by other kernels than the token after them; and too few to fill a block of the prefix cache."""
_NUM_OUTPUT_TOKENS = 2
"""The second one is computed alone, or with the drafts that the first step has made."""

Submit = Callable[[GenerationRequest], Awaitable[GenerationStream]]


async def take(submit: Submit, num_engines: int, max_model_len: int) -> None:
    """Every data-parallel engine takes a prefill and a step of decoding. Raises GenserveError."""
    for rank in range(num_engines):  # one after the other: --max-active-requests may be 1
        await _generate(submit, rank, max_model_len)


@contextmanager
def uncounted(llm: Any) -> Iterator[None]:
    """Nothing is counted or traced in the block by vLLM's `llm`, an AsyncLLM."""
    # internal: the running output handler's own reference, which vLLM exchanges too when it adds engines.
    counting, llm._logger_ref[0] = llm._logger_ref[0], None
    traces, llm.output_processor.tracing_enabled = llm.output_processor.tracing_enabled, False
    try:
        yield
    finally:
        llm._logger_ref[0], llm.output_processor.tracing_enabled = counting, traces


async def _generate(submit: Submit, rank: int, max_model_len: int) -> None:
    num_prompt_tokens = min(_NUM_PROMPT_TOKENS, max_model_len - 1)
    request = GenerationRequest(
        f"first step of engine {rank}",
        TokenPrompt([_TOKEN] * num_prompt_tokens),
        stop=Stop(max_tokens=_NUM_OUTPUT_TOKENS, ignore_eos=True),
        data_parallel_rank=rank,
        cache_salt=uuid.uuid4().hex,  # no other request finds what is left of it
    )
    stream = await submit(request)
    ready = asyncio.Event()
    stream.call_when_ready(ready.set)
    while not stream.is_finished:
        await ready.wait()
        ready.clear()
        stream.take()
