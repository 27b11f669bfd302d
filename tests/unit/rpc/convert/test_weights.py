"""Headers and reports cross the wire unchanged."""

from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import json_format

from genserve.control.conditions import Phase
from genserve.control.leases import PauseLease
from genserve.control.state import EngineState
from genserve.engine.types import KvPolicy, Load, PauseMode, WeightDigest
from genserve.errors import InvalidFieldError
from genserve.rpc.convert.values import to_state
from genserve.rpc.convert.weights import apply_options, push_header, to_applied, to_digests, to_push
from genserve.tensors.manifest import Manifest, PushIssue, TensorSpec
from genserve.v1 import types_pb2, weights_pb2
from genserve.weights.push.types import (
    Applied,
    ApplyOptions,
    PrepareMode,
    PushAction,
    PushHeader,
    PushReport,
    PushState,
)
from genserve.wire.conversions import duration_of, manifest_message
from tests.support.refusals import refuses

STATE = EngineState("i", 3, Phase.RUNNING, (), Load(1, 2, 0.0, 0.0, 0.0))
MANIFEST = Manifest((TensorSpec("w", "BF16", (2, 3), 0, 12), TensorSpec("scalar", "F32", (), 12, 4)), 16, True)


def header(**fields: Any) -> PushHeader:
    """The header for fields as JSON has them."""
    return push_header(json_format.ParseDict(fields, weights_pb2.PushHeader()))


def test_a_bare_header_has_the_contract_s_defaults() -> None:
    """APPLY, KEEP, RECOMPUTE, one stream, 300 s to apply and 300 s of staging."""
    assert header(pushId="p", weightVersion=1) == PushHeader(
        push_id="p",
        weight_version=1,
        expected_version=None,
        manifest=None,
        manifest_digest="",
        action=PushAction.APPLY,
        apply=ApplyOptions(PauseMode.KEEP, KvPolicy.RECOMPUTE, "", 300.0),
        staging_ttl_s=300.0,
        num_streams=1,
        force=False,
        prepared_ttl_s=60.0,
        content_digest="",
    )


def test_everything_in_a_header_arrives() -> None:
    """Expecting version 0 is not the same as expecting none."""
    given = header(
        pushId="p", weightVersion=7, expectedVersion=0, manifest=json_manifest(), manifestDigest="d",
        action="PUSH_ACTION_STAGE", stagingTtl="1.5s", numStreams=4, force=True, preparedTtl="2.5s", contentDigest="c",
        apply={"pauseMode": "PAUSE_MODE_ABORT", "kvPolicy": "KV_POLICY_REUSE", "pauseLeaseId": "l", "timeout": "2s"},
    )  # fmt: skip
    apply = ApplyOptions(PauseMode.ABORT, KvPolicy.REUSE, "l", 2.0)
    expected = PushHeader("p", 7, 0, MANIFEST, "d", PushAction.STAGE, apply, 1.5, 4, True)
    assert given == replace(expected, prepared_ttl_s=2.5, content_digest="c")


@pytest.mark.parametrize("action", PushAction)
def test_every_action_has_its_number(action: PushAction) -> None:
    """By its name."""
    assert header(action=f"PUSH_ACTION_{action.value}").action is action


@pytest.mark.parametrize("mode", PrepareMode)
def test_every_prepare_mode_has_its_number(mode: PrepareMode) -> None:
    assert header(apply={"prepareMode": f"PREPARE_MODE_{mode.value}"}).apply.prepare_mode is mode


def json_manifest() -> dict[str, Any]:
    """MANIFEST as GetWeights tells it."""
    return json_format.MessageToDict(manifest_message(MANIFEST))


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"action": 99}, "header.action"),
        ({"stagingTtl": "0s"}, "header.staging_ttl"),
        ({"apply": {"timeout": "-1s"}}, "header.apply.timeout"),
        ({"apply": {"pauseMode": 99}}, "header.apply.pause_mode"),
        ({"apply": {"kvPolicy": 99}}, "header.apply.kv_policy"),
    ],
)
def test_a_bad_field_is_named_by_its_path_in_the_frame(fields: dict[str, Any], path: str) -> None:
    """As in PushWeightsRequest."""
    with pytest.raises(InvalidFieldError) as caught:
        header(**fields)
    assert caught.value.violations[0].field == path


def test_a_bad_field_of_a_commit_is_named_by_its_own_path() -> None:
    """It comes in another request."""
    with refuses(InvalidFieldError, field="apply.timeout"):
        apply_options(weights_pb2.ApplyOptions(timeout=duration_of(-1)), "apply")


def test_an_outcome_arrives_in_a_response() -> None:
    """With the state of the engine."""
    report = PushReport("p", PushState.APPLIED, 4, 16, 32, ((16, 20), (24, 32)), (PushIssue("w", "is odd"),), "digest")
    applied = Applied(3, 4, {"receive": 0.25, "commit": 0.5}, 0.125, 5, 6, 7, 1.5, 2.5)
    response = weights_pb2.PushWeightsResponse(push=to_push(report), applied=to_applied(applied), state=to_state(STATE))
    assert json_format.MessageToDict(response) == {
        "push": {
            "pushId": "p", "state": "PUSH_STATE_APPLIED", "weightVersion": 4, "receivedBytes": "16", "totalBytes": "32",
            "missing": [{"start": "16", "end": "20"}, {"start": "24", "end": "32"}],
            "issues": [{"tensor": "w", "description": "is odd"}], "manifestDigest": "digest",
        },
        "applied": {
            "previousVersion": 3, "activeVersion": 4, "paused": "0.125s", "requestsKept": 5, "requestsAborted": 6,
            "timings": [{"step": "receive", "duration": "0.250s"}, {"step": "commit", "duration": "0.500s"}],
            "recomputedTokens": 7, "longestWait": "1.500s", "discard": "2.500s",
        },
        "state": {
            "instanceId": "i", "weightVersion": 3, "phase": "PHASE_RUNNING", "runningRequests": 1, "waitingRequests": 2
        },
    }  # fmt: skip


def test_nothing_applied_is_not_applied_with_zeros() -> None:
    """`applied` is unset; and `paused` is unset when the engine stays paused, as is what is not known yet."""
    assert not weights_pb2.PushWeightsResponse(applied=to_applied(None)).HasField("applied")
    staying = to_applied(Applied(0, 1, {}, None, 0, 0))
    assert staying is not None and not staying.HasField("paused")
    assert not any(map(staying.HasField, ("recomputed_tokens", "longest_wait", "discard")))
    known = to_applied(Applied(0, 1, {}, None, 0, 0, 0, 0.0, 0.0))
    assert known is not None and all(map(known.HasField, ("recomputed_tokens", "longest_wait", "discard")))


def test_every_push_state_has_its_value() -> None:
    """Names on the wire are those inside."""
    for state in PushState:
        push = to_push(PushReport("p", state, 1, 0, 0))
        assert weights_pb2.PushState.Name(push.state) == f"PUSH_STATE_{state.name}"


def test_a_digest_arrives_with_its_rank_and_name() -> None:
    """One message for each."""
    (digest,) = to_digests([WeightDigest("dp0:pp0:pcp0:tp0", "w", "ab")])
    assert (digest.rank, digest.name, digest.sha256) == ("dp0:pp0:pcp0:tp0", "w", "ab")


def test_leases_tell_when_they_end_only_if_they_do() -> None:
    """A lease without expiry has no expire_time, not 1970."""
    leases = (PauseLease("a", "h", PauseMode.WAIT, 5.0, 1700000000.25), PauseLease("b", "", PauseMode.KEEP, None, None))
    one, two = to_state(EngineState("i", 0, Phase.PAUSED, leases, STATE.load)).pauses
    assert (one.lease_id, one.holder, one.mode) == ("a", "h", types_pb2.PAUSE_MODE_WAIT)
    assert one.expire_time.ToMilliseconds() == 1700000000250
    assert not two.HasField("expire_time")


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_its_value(phase: Phase) -> None:
    """Names on the wire are those inside."""
    assert types_pb2.Phase.Name(to_state(EngineState("i", 0, phase, (), STATE.load)).phase) == f"PHASE_{phase.name}"
