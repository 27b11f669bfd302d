"""What the calls of vLLM's own weight transfer ask for, defaults and mistakes included."""

import json
from typing import Any

import pytest
from google.protobuf import json_format

from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import InvalidFieldError
from genserve.rpc.convert.vllm_transfer import call_timeout_s, init_info, update_info, update_options
from genserve.v1 import weights_pb2
from genserve.weights.vllm_transfer import UpdateOptions
from tests.support.refusals import refuses


def options(**fields: Any) -> UpdateOptions:
    """Those of fields as JSON has them."""
    return update_options(json_format.ParseDict(fields, weights_pb2.StartWeightUpdateRequest()))


def test_a_bare_start_has_the_contract_s_defaults() -> None:
    """KEEP, RECOMPUTE, 60 s to begin, and 60 s until a trainer that has died is noticed."""
    assert options() == UpdateOptions(PauseMode.KEEP, KvPolicy.RECOMPUTE, "", "", ttl_s=60.0, timeout_s=60.0)


def test_everything_in_a_start_arrives() -> None:
    """Field by field."""
    given = options(
        updateId="u", pauseMode="PAUSE_MODE_WAIT", kvPolicy="KV_POLICY_REUSE", pauseLeaseId="l", ttl="2s", timeout="3s"
    )
    assert given == UpdateOptions(PauseMode.WAIT, KvPolicy.REUSE, "l", "u", ttl_s=2.0, timeout_s=3.0)


@pytest.mark.parametrize("name", ["InitWeightTransfer", "UpdateWeights", "FinishWeightUpdate"])
def test_vllm_has_five_minutes_unless_the_caller_says_otherwise(name: str) -> None:
    """Each of the three calls."""
    kind = getattr(weights_pb2, f"{name}Request")
    assert call_timeout_s(kind()) == 300.0
    assert call_timeout_s(json_format.ParseDict({"timeout": "1.5s"}, kind())) == 1.5


@pytest.mark.parametrize("text", ["", "nope", "1", "null", '"text"', "[" * 100_000])
def test_what_is_no_json_of_its_kind_is_refused(text: str) -> None:
    """By its field, and a list only where vLLM takes one by rank."""
    for read, message, field in (
        (init_info, weights_pb2.InitWeightTransferRequest(init_info=text), "init_info"),
        (update_info, weights_pb2.UpdateWeightsRequest(update_info=text), "update_info"),
    ):
        with pytest.raises(InvalidFieldError) as caught:
            read(message)  # type: ignore[operator]
        assert caught.value.violations[0].field == field


def test_information_is_passed_on_as_it_came() -> None:
    """vLLM reads it."""
    text = json.dumps({"names": ["w"]}, indent=3)
    assert init_info(weights_pb2.InitWeightTransferRequest(init_info=text)) == text
    for each in (text, f"[{text}]"):
        assert update_info(weights_pb2.UpdateWeightsRequest(update_info=each)) == each
    with refuses(InvalidFieldError, field="init_info"):
        init_info(weights_pb2.InitWeightTransferRequest(init_info=f"[{text}]"))
    with refuses(InvalidFieldError, field="update_info"):
        update_info(weights_pb2.UpdateWeightsRequest(update_info="1"))
