"""The client of the engine that vLLM's server gets. A request that the engine does not take is answered with
status 400 and the reason: the daemon's relay, which looks at the same table, would end it without one. And answers name
the versions that sampled them."""

from collections.abc import AsyncGenerator
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from genserve.engine.vllm.openai import versions
from genserve.engine.vllm.requests import refusals
from genserve.engine.vllm.requests.weight_spans import version_of


class CheckedEngine:
    """All of `engine`, an AsyncLLM, with checks before it generates."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._serving = refusals.Serving.of(engine.vllm_config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncLLM.generate. Raises VLLMValidationError at once, while the status of the answer can still say it."""
        for row in refusals.refused(sampling_params, self._serving):
            raise VLLMValidationError(f"{row.parameter} {row.message}", parameter=row.parameter)
        return _noting_versions(self._engine.generate(prompt, sampling_params, *args, **kwargs))


async def _noting_versions(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    try:
        async for output in outputs:
            for each in output.outputs:  # vLLM knows them when a sequence has ended
                versions.note(version_of(span.version) for span in each.weight_versions or ())
            yield output
    finally:
        await outputs.aclose()  # which aborts the request
