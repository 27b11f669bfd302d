"""Mistakes of a daemon, which a relay makes on the way."""

from collections.abc import Callable
from typing import Any

from google.rpc import error_details_pb2, status_pb2

from clients.conformance.runner.relay import Change
from genserve.v1 import generation_pb2, weights_pb2

_PUSH = "/genserve.v1.WeightService/PushWeights"
_GENERATE, _MANY = "/genserve.v1.GenerationService/Generate", "/genserve.v1.GenerationService/GenerateMany"


def _wrong_usage(response: Any) -> None:
    if response.HasField("usage"):
        response.usage.num_output_tokens += 1


def _wrong_span(response: Any) -> None:
    for output in response.outputs:
        if output.HasField("finish"):
            for span in (*output.weight_spans[-1:], *output.finish.weight_spans[-1:]):
                span.end += 1


def _wrong_request_id(response: Any) -> None:
    if response.request_id:
        response.request_id += "0"


def _wrong_prompt(response: Any) -> None:
    if response.HasField("prompt"):
        response.prompt.num_tokens += 1


def _wrong_length(response: Any) -> None:
    for output in response.outputs:
        if output.HasField("finish"):
            output.finish.num_tokens += 1


def _wrong_received_bytes(response: Any) -> None:
    response.push.received_bytes += 1


def _wrong_active_version(response: Any) -> None:
    response.applied.active_version += 1


def _in_pushes(change: Callable[[Any], None]) -> Callable[[str, bytes], bytes]:
    def changed(method: str, message: bytes) -> bytes:
        if method != _PUSH:
            return message
        response = weights_pb2.PushWeightsResponse.FromString(message)
        change(response)
        return response.SerializeToString()

    return changed


def _in_generations(change: Callable[[Any], None]) -> Callable[[str, bytes], bytes]:
    def changed(method: str, message: bytes) -> bytes:
        if method == _GENERATE:
            response = generation_pb2.GenerateResponse.FromString(message)
            change(response)
            return response.SerializeToString()
        if method == _MANY:
            many = generation_pb2.GenerateManyResponse.FromString(message)
            for item in many.items:
                change(item.response)
            return many.SerializeToString()
        return message

    return changed


def _wrong_reason(details: bytes) -> bytes:
    status = status_pb2.Status.FromString(details)
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            info.reason = {"WEIGHT_VERSION_MISMATCH": "VERSION_NOT_NEWER"}.get(info.reason, info.reason)
            detail.Pack(info)
    return bytes(status.SerializeToString())


MUTATIONS = {
    "usage": Change(response=_in_generations(_wrong_usage)),
    "reason": Change(details=_wrong_reason),
    "span": Change(response=_in_generations(_wrong_span)),  # its end, by one token
    "request-id": Change(response=_in_generations(_wrong_request_id)),
    "prompt": Change(response=_in_generations(_wrong_prompt)),  # its number of tokens
    "length": Change(response=_in_generations(_wrong_length)),  # of a finished sequence
    "received-bytes": Change(response=_in_pushes(_wrong_received_bytes)),
    "active-version": Change(response=_in_pushes(_wrong_active_version)),
}
"""Mistakes of a daemon, by what is wrong in its answers. The table must show each."""
