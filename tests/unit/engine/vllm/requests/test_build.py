"""What vLLM is asked for: what a request says about its scheduling arrives."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from genserve.engine.generation import GenerationRequest, Output, Sampling, Stop, TextPrompt, TokenPrompt
from genserve.engine.types import EngineInfo
from genserve.engine.vllm.requests.build import RequestBuilder, sampling_fields
from genserve.engine.vllm.requests.refusals import request_field
from genserve.errors import InvalidFieldError
from genserve.observe import trace
from tests.support.refusals import refuses
from tests.unit.engine.vllm.requests.scripted_llm import CONFIG, UNTRACED

INFO = EngineInfo("m", "M", "bfloat16", 8, "cpu", 64, 4, 4, 4, 1, 1, 1, {})
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


SPECULATIVE = "The min_p and logit_bias sampling parameters are not yet supported with speculative decoding."
TRACED = SimpleNamespace(otlp_traces_endpoint="http://127.0.0.1:4317")
HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


async def supported_tasks() -> tuple[str, ...]:
    return ("generate",)


def llm_with(processor: InputProcessor, observability: Any = UNTRACED) -> Any:
    """As much of AsyncLLM as a builder uses."""
    return SimpleNamespace(
        input_processor=processor,
        get_supported_tasks=supported_tasks,
        vllm_config=CONFIG,
        observability_config=observability,
    )


@pytest.mark.parametrize(("observability", "headers"), [(TRACED, HEADERS), (UNTRACED, None)])
async def test_what_a_request_says_of_its_scheduling_reaches_vllm(observability: Any, headers: Any) -> None:
    """Its priority, its data-parallel engine, whom it shares its cache with, and its adapter; and its trace, where vLLM
    exports one."""
    trace.use_headers(HEADERS)
    processor = InputProcessor()
    builder = RequestBuilder(llm_with(processor, observability), INFO)
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
    ("stop", "max_tokens", "min_tokens"),
    [
        (Stop(), 64, 0),
        (Stop(max_tokens=63, min_tokens=63), 63, 63),
        (Stop(max_tokens=2**31 - 1), 64, 0),
        (Stop(max_tokens=2**31 - 1, min_tokens=2**31 - 1), 64, 64),
    ],
)
async def test_no_more_tokens_are_asked_for_than_the_context_holds(
    stop: Stop, max_tokens: int, min_tokens: int
) -> None:
    """vLLM's Model Runner V2 adds the prompt's length to both in 32 bits, and ends its engine when they overflow."""
    builder = RequestBuilder(llm_with(InputProcessor()), INFO)
    try:
        built = await builder.engine_request(GenerationRequest("r", TokenPrompt([1, 2]), stop=stop), [1, 2], None)
    finally:
        builder.close()
    assert built.sampling_params is not None
    assert (built.sampling_params.max_tokens, built.sampling_params.min_tokens) == (max_tokens, min_tokens)


class AddsEos(InputProcessor):
    """Completes parameters as vLLM does: with the checkpoint's EOS token."""

    def process_inputs(self, request_id: str, prompt: Any, params: SamplingParams, **asked: Any) -> EngineCoreRequest:
        params.update_from_generation_config({}, 500)
        return super().process_inputs(request_id, prompt, params, **asked)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"sampling": Sampling(allowed_token_ids=[3] * 1025)}, "sampling.allowed_token_ids"),
        ({"stop": Stop(token_ids=[*range(128)], min_tokens=1)}, "stop.token_ids"),
        ({"sampling": Sampling(n=2, seed=2**63 - 1)}, "sampling.seed"),
    ],
)
async def test_what_the_model_runner_cannot_serve_is_refused(asked: dict[str, Any], field: str) -> None:
    """Before vLLM adds what it knows, such as EOS tokens, and afterwards."""
    builder = RequestBuilder(llm_with(AddsEos()), INFO)
    with pytest.raises(InvalidFieldError) as caught:
        await builder.engine_request(GenerationRequest("r", TokenPrompt([1]), **asked), [1], None)
    builder.close()
    assert [each.field for each in caught.value.violations] == [field]


class Refuses(InputProcessor):
    """Refuses each request, in words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def process_inputs(self, request_id: str, prompt: Any, params: SamplingParams, **asked: Any) -> EngineCoreRequest:
        raise VLLMValidationError(self._words)


@pytest.mark.parametrize(
    ("words", "asked", "field"),
    [
        ("n must be 1 when using greedy sampling, got 3.", {"sampling": Sampling(temperature=0.0, n=3)}, "sampling.n"),
        (SPECULATIVE, {"sampling": Sampling(logit_bias={1: 2.0})}, "sampling.logit_bias"),
        (SPECULATIVE, {"sampling": Sampling(min_p=0.5)}, "sampling.min_p"),
        ("stop it", {"sampling": Sampling(min_p=0.5)}, "request"),
    ],
)
async def test_a_refusal_of_vllm_names_the_field_that_it_mentions(
    words: str, asked: dict[str, Any], field: str
) -> None:
    """The one that the request has set."""
    builder = RequestBuilder(llm_with(Refuses(words)), INFO)
    with refuses(InvalidFieldError, field=field):
        await builder.engine_request(GenerationRequest("r", TokenPrompt([1]), **asked), [1], None)
    builder.close()


SAMPLING_PARAMS = {f.name for f in msgspec.structs.fields(SamplingParams) if not f.name.startswith("_")}


def request_with(**changes: object) -> GenerationRequest:
    """A request with some fields set."""
    return GenerationRequest("r", TextPrompt("x"), **changes)  # type: ignore[arg-type]


def test_a_zero_is_passed_on_and_an_absent_field_is_not() -> None:
    """Presence decides, not truth."""
    fields = sampling_fields(request_with(sampling=Sampling(temperature=0.0, seed=0)))
    assert fields["temperature"] == 0.0 and fields["seed"] == 0
    assert "top_p" not in fields


def test_no_limit_of_tokens_means_what_the_context_holds() -> None:
    """vLLM's own default of 16 would surprise."""
    assert sampling_fields(request_with())["max_tokens"] is None


def test_stop_strings_need_text_even_when_none_is_wanted() -> None:
    """They are matched on text."""
    wanted = Output(text=False)
    assert sampling_fields(request_with(output=wanted))["detokenize"] is False
    assert sampling_fields(request_with(output=wanted, stop=Stop(strings=["x"])))["detokenize"] is True


def test_every_field_exists_in_vllm() -> None:
    """Names are passed on as keywords."""
    everything = Sampling(*([1] * len(Sampling.__dataclass_fields__)))  # type: ignore[arg-type]
    assert set(sampling_fields(request_with(sampling=everything, stop=Stop(min_tokens=1)))) <= SAMPLING_PARAMS


def test_a_complaint_of_vllm_names_the_field_of_the_request() -> None:
    """A client never sees a name that it did not send."""
    assert request_field("temperature") == "sampling.temperature"
    assert request_field("include_stop_str_in_output") == "stop.include_stop"
    assert request_field("thinking_token_budget") == "engine_params.thinking_token_budget"


def test_every_field_of_a_request_reaches_vllm_under_its_own_name() -> None:
    """With its value, which no other field has."""
    sampling = Sampling(0.1, 0.2, 3, 0.4, 0.5, 0.6, 0.7, 8, 9, {10: 1.0}, [11], ["bad"])
    stop = Stop(12, 13, ("stop",), (14,), True, True)
    output = Output(text=True, skip_special_tokens=False, logprobs=15, prompt_logprobs=16, stream_interval=17)
    asked = request_with(sampling=sampling, stop=stop, output=output)
    fields = sampling_fields(asked)
    assert fields == {
        **dataclasses.asdict(sampling),
        "max_tokens": 12, "min_tokens": 13, "stop": ["stop"], "stop_token_ids": [14], "ignore_eos": True,
        "include_stop_str_in_output": True, "logprobs": 15, "prompt_logprobs": 16, "skip_special_tokens": False,
        "stream_interval": 17, "detokenize": True,
    }  # fmt: skip


IMPORTED_BY_A_CONSTRAINT = """
import sys
from contextlib import suppress
from types import SimpleNamespace
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.config import StructuredOutputsConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from genserve.engine.vllm.requests.build import RequestBuilder
from genserve.engine.vllm.requests.prompts import PromptCodec
from tests.unit.engine.vllm.requests.test_build import INFO, InputProcessor, llm_with

RequestBuilder(llm_with(InputProcessor()), INFO).close()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])))
PromptCodec(tokenizer, 8, 8, vocab_size=1, trust_templates=False).close()
before = set(sys.modules)
model = SimpleNamespace(is_diffusion=False, skip_tokenizer_init=False)
refused_by_two = '{"patternProperties": {"a": {"type": "integer", "multipleOf": 3}}}'  # which the third one takes
for backend in ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"):
    for constraint in (
        {"regex": "[ab]+"}, {"json": '{"type": "object"}'}, {"choice": ["a"]}, {"grammar": 'root ::= "a"'},
        {"json_object": True}, {"regex": "(?=a)"}, {"json": refused_by_two}, {"structural_tag": "{}"},
    ):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
        with suppress(Exception):  # for those that no backend takes
            params._validate_structured_outputs(model, StructuredOutputsConfig(backend=backend), tokenizer)
with suppress(Exception):
    tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], chat_template="{{ raise_exception('no') }}")
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""


@pytest.mark.slow
def test_nothing_is_imported_where_work_is_ended_in_the_middle() -> None:
    """A thread that is interrupted within an import may keep the lock of that: nobody's constraint would be compiled
    any more, and the daemon would not end."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_BY_A_CONSTRAINT], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1:] in ([], [""]), done.stdout
