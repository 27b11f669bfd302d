"""What vLLM is asked for: what a request says about its scheduling arrives."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from genserve import trace
from genserve.engine.generation import GenerationRequest, Sampling, TokenPrompt
from genserve.engine.types import EngineInfo
from genserve.engine.vllm.requests.build import RequestBuilder
from genserve.errors import InvalidFieldError

INFO = EngineInfo("m", "M", "bfloat16", 8, "cpu", 64, 4, 4, 1, 1, 1, {})
LORA = LoRARequest("policy", 1, "/nowhere")


class InputProcessor:
    """Makes vLLM's request of what it is asked for, and remembers that."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def process_inputs(self, request_id: str, prompt: Any, params: SamplingParams, **asked: Any) -> EngineCoreRequest:
        self.asked = {"request_id": request_id, "prompt": prompt, "temperature": params.temperature, **asked}
        return EngineCoreRequest(
            request_id=request_id, prompt_token_ids=prompt["prompt_token_ids"], mm_features=None,
            sampling_params=params, pooling_params=None,
            arrival_time=0.0, lora_request=asked["lora_request"], cache_salt=None,
            data_parallel_rank=asked["data_parallel_rank"], priority=asked["priority"],
        )  # fmt: skip


TRACED, UNTRACED = (SimpleNamespace(otlp_traces_endpoint=each) for each in ("http://127.0.0.1:4317", None))
HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


async def supported_tasks() -> tuple[str, ...]:
    return ("generate",)


@pytest.mark.parametrize(("observability", "headers"), [(TRACED, HEADERS), (UNTRACED, None)])
async def test_what_a_request_says_of_its_scheduling_reaches_vllm(observability: Any, headers: Any) -> None:
    """Its priority, its data-parallel engine, whom it shares its cache with, and its adapter; and its trace, where vLLM
    exports one."""
    trace.use_headers(HEADERS)
    processor = InputProcessor()
    config = SimpleNamespace(scheduler_config=SimpleNamespace(enable_chunked_prefill=False))
    llm: Any = SimpleNamespace(
        input_processor=processor,
        get_supported_tasks=supported_tasks,
        vllm_config=config,
        observability_config=observability,
    )
    builder = RequestBuilder(llm, INFO, 4)
    request = GenerationRequest(
        "r", TokenPrompt([1, 2]), Sampling(temperature=0.5), priority=-3, data_parallel_rank=2, cache_salt="salt"
    )
    try:
        prepared = await builder.engine_request(request, [1, 2], LORA)
    finally:
        builder.close()
    asked = processor.asked
    assert (asked["request_id"], asked["temperature"], asked["supported_tasks"]) == ("r", 0.5, ("generate",))
    assert (asked["priority"], asked["data_parallel_rank"], asked["lora_request"]) == (-3, 2, LORA)
    assert (asked["prompt"]["prompt_token_ids"], asked["prompt"]["cache_salt"]) == ([1, 2], "salt")
    assert (prepared.request_id, prepared.priority) == ("r", -3)
    assert asked["trace_headers"] == headers


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"sampling": Sampling(n=5)}, "sampling.n"),
        ({"sampling": Sampling(n=2, seed=2**63 - 1)}, "sampling.seed"),
        ({"cache_salt": "x" * 1025}, "cache.salt"),
    ],
)
def test_what_cannot_be_is_refused_before_the_prompt_is_read(fields: dict[str, Any], path: str) -> None:
    """And what just can be is not."""
    builder = RequestBuilder(SimpleNamespace(observability_config=UNTRACED), INFO, 4)  # type: ignore[arg-type]
    builder.check_early(GenerationRequest("r", TokenPrompt([1]), Sampling(n=4, seed=2**63 - 4), cache_salt="x" * 1024))
    with pytest.raises(InvalidFieldError) as caught:
        builder.check_early(GenerationRequest("r", TokenPrompt([1]), **fields))
    assert caught.value.violations[0].field == path
    builder.close()
