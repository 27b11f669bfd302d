"""Messages of vLLM's own weight transfer to and from domain types."""

import json

from genserve.errors import InvalidFieldError
from genserve.rpc.convert.values import KV_POLICIES_OF_UPDATES, PAUSE_MODES, member_of, seconds_or
from genserve.v1 import weights_pb2
from genserve.weights.vllm_transfer import DEFAULT_START_TIMEOUT_S, DEFAULT_TTL_S, UpdateOptions

DEFAULT_CALL_TIMEOUT_S = 300.0


def init_info(message: weights_pb2.InitWeightTransferRequest) -> str:
    """vLLM's init_info: the text of a JSON object."""
    return _json_text(message.init_info, "init_info", dict)


def update_info(message: weights_pb2.UpdateWeightsRequest) -> str:
    """vLLM's update_info: the text of a JSON object, or of a list by rank."""
    return _json_text(message.update_info, "update_info", dict, list)


def update_options(message: weights_pb2.StartWeightUpdateRequest) -> UpdateOptions:
    """How to begin, with defaults."""
    return UpdateOptions(
        update_id=message.update_id,
        pause_mode=member_of(PAUSE_MODES, message.pause_mode, "pause_mode"),
        kv_policy=member_of(KV_POLICIES_OF_UPDATES, message.kv_policy, "kv_policy"),
        pause_lease_id=message.pause_lease_id,
        ttl_s=seconds_or(message, "ttl", DEFAULT_TTL_S),
        timeout_s=seconds_or(message, "timeout", DEFAULT_START_TIMEOUT_S),
    )


def call_timeout_s(
    message: weights_pb2.InitWeightTransferRequest
    | weights_pb2.UpdateWeightsRequest
    | weights_pb2.FinishWeightUpdateRequest,
) -> float:
    """Time limit of vLLM's call, in seconds."""
    return seconds_or(message, "timeout", DEFAULT_CALL_TIMEOUT_S)


def _json_text(text: str, field: str, *kinds: type) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError.of(field, f"is not JSON: {error}") from None
    if not isinstance(value, kinds):
        raise InvalidFieldError.of(field, f"must be a JSON object{' or a list' if list in kinds else ''}")
    return text
