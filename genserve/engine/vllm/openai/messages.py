"""What the daemon reads and says in the messages between EngineCore and an OpenAI server. Pure.

internal: vLLM's messages are msgpack arrays. The types here have the first fields of vLLM's own, so that the rest of a
message, its tensors above all, is not decoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType, FinishReason, UtilityOutput
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackEncoder, UtilityResult

ADD = EngineCoreRequestType.ADD.value
ABORT = EngineCoreRequestType.ABORT.value
UTILITY = EngineCoreRequestType.UTILITY.value

NIL: Final = msgspec.msgpack.encode(None)

Frames = list[Any]
"""Buffers of one message."""


class Params(
    msgspec.Struct,
    gc=False,
    rename={"all_stop_token_ids": "_all_stop_token_ids", "bad_words_token_ids": "_bad_words_token_ids"},
):
    """What `requests.refusals` reads of SamplingParams, with vLLM's defaults."""

    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int = 0
    all_stop_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    watermarking: bool | None = None


class Request(msgspec.Struct, array_like=True, gc=False):
    """The beginning of an EngineCoreRequest."""

    request_id: str
    prompt_token_ids: list[int] | None = None
    mm_features: msgspec.Raw = msgspec.Raw()
    sampling_params: Params | None = None
    pooling_params: msgspec.Raw = msgspec.Raw()
    arrival_time: float = 0.0
    lora_request: msgspec.Raw = msgspec.Raw(NIL)


class Call(msgspec.Struct, array_like=True, gc=False):
    """The beginning of a call of one of EngineCore's methods."""

    client_index: int
    call_id: int
    method: str


class Output(msgspec.Struct, array_like=True, gc=False):
    """The beginning of an EngineCoreOutput: new tokens of one sequence. A sequence with a `finish_reason` has ended."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: msgspec.Raw = msgspec.Raw()
    new_prompt_logprobs_tensors: msgspec.Raw = msgspec.Raw()
    pooling_output: msgspec.Raw = msgspec.Raw()
    finish_reason: int | None = None


class Outputs(msgspec.Struct, array_like=True, gc=False):
    """The beginning of EngineCoreOutputs: one step of one engine, or the answer to a call."""

    engine_index: int = 0
    outputs: list[Output] = []
    scheduler_stats: SchedulerStats | None = None


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a client's row reads of vLLM's IterationStats: tokens that came, and for how many seconds each of their
    sequences was without output before."""

    num_generation_tokens: int
    inter_token_latencies_iter: list[float]


request_of = msgspec.msgpack.Decoder(Request).decode
call_of = msgspec.msgpack.Decoder(Call).decode
ids_of = msgspec.msgpack.Decoder(list[str]).decode
outputs_of = msgspec.msgpack.Decoder(Outputs).decode


def abort(request_ids: Sequence[str]) -> Frames:
    """Ends sequences. EngineCore does not answer."""
    return [ABORT, msgspec.msgpack.encode(list(request_ids))]


def ended(engine_index: int, request_ids: Sequence[str], reason: FinishReason) -> Frames:
    """As if an engine said that these sequences have ended."""
    outputs = [EngineCoreOutput(request_id=each, new_token_ids=[], finish_reason=reason) for each in request_ids]
    return _encoded(EngineCoreOutputs(engine_index=engine_index, outputs=outputs))


def refused(engine_index: int, call: Call, why: str) -> Frames:
    """As if a call had failed."""
    answer = UtilityOutput(call.call_id, failure_message=why)
    return _encoded(EngineCoreOutputs(engine_index=engine_index, utility_output=answer))


def done(engine_index: int, call: Call) -> Frames:
    """As if a call had returned nothing."""
    answer = UtilityOutput(call.call_id, result=UtilityResult(None))
    return _encoded(EngineCoreOutputs(engine_index=engine_index, utility_output=answer))


def _encoded(outputs: EngineCoreOutputs) -> Frames:
    frames: Any = MsgpackEncoder().encode(outputs)
    return list(frames)
