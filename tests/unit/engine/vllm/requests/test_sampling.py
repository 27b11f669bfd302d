"""Fields of SamplingParams out of a request."""

import dataclasses

import msgspec
from vllm.sampling_params import SamplingParams

from genserve.engine.generation import GenerationRequest, Output, Sampling, Stop, TextPrompt
from genserve.engine.vllm.requests.sampling import request_field, sampling_fields

KNOWN = {f.name for f in msgspec.structs.fields(SamplingParams) if not f.name.startswith("_")}


def request(**changes: object) -> GenerationRequest:
    """A request with some fields set."""
    return GenerationRequest("r", TextPrompt("x"), **changes)  # type: ignore[arg-type]


def test_a_zero_is_passed_on_and_an_absent_field_is_not() -> None:
    """Presence decides, not truth."""
    fields = sampling_fields(request(sampling=Sampling(temperature=0.0, seed=0)))
    assert fields["temperature"] == 0.0 and fields["seed"] == 0
    assert "top_p" not in fields


def test_no_limit_of_tokens_means_what_the_context_holds() -> None:
    """vLLM's own default of 16 would surprise."""
    assert sampling_fields(request())["max_tokens"] is None


def test_stop_strings_need_text_even_when_none_is_wanted() -> None:
    """They are matched on text."""
    wanted = Output(text=False)
    assert sampling_fields(request(output=wanted))["detokenize"] is False
    assert sampling_fields(request(output=wanted, stop=Stop(strings=["x"])))["detokenize"] is True


def test_every_field_exists_in_vllm() -> None:
    """Names are passed on as keywords."""
    everything = Sampling(*([1] * len(Sampling.__dataclass_fields__)))  # type: ignore[arg-type]
    assert set(sampling_fields(request(sampling=everything, stop=Stop(min_tokens=1)))) <= KNOWN


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
    asked = request(sampling=sampling, stop=stop, output=output, engine_params={"thinking_token_budget": 18})
    fields = sampling_fields(asked)
    assert fields == {
        **dataclasses.asdict(sampling),
        "max_tokens": 12, "min_tokens": 13, "stop": ["stop"], "stop_token_ids": [14], "ignore_eos": True,
        "include_stop_str_in_output": True, "logprobs": 15, "prompt_logprobs": 16, "skip_special_tokens": False,
        "stream_interval": 17, "detokenize": True, "thinking_token_budget": 18,
    }  # fmt: skip
