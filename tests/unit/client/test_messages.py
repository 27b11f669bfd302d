"""The messages of all calls: the request with every argument and with as few as possible, and what becomes of the
answer."""

import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from genserve.client import (
    AbortResult,
    Applied,
    AsyncClient,
    EngineState,
    FinishedUpdate,
    FleetReplica,
    HeldPause,
    Lora,
    PauseLease,
    PauseResult,
    PulledWeights,
    Push,
    PushInFlight,
    PushResult,
    Replicas,
    ResumeResult,
    ServedWeights,
    ServerInfo,
    StartedUpdate,
    Status,
)
from genserve.errors import GenserveError
from genserve.v1 import control_pb2, fleet_pb2, generation_pb2, types_pb2, weights_pb2
from tests.support.silent_daemon import SilentDaemon, silent_daemon
from tests.unit.client.call_table import ARGUMENTS, public_calls


def seconds(number: int) -> Duration:
    """As a message has them."""
    return Duration(seconds=number)


APPLY: Final = weights_pb2.ApplyOptions(
    pause_mode=types_pb2.PAUSE_MODE_WAIT, kv_policy=types_pb2.KV_POLICY_REUSE, pause_lease_id="l", timeout=seconds(9),
    prepare_mode=weights_pb2.PREPARE_MODE_PAUSED,
)  # fmt: skip
APPLY_OPTIONS: Final = {
    "pause_mode": "wait", "kv_policy": "reuse", "pause_lease_id": "l", "apply_timeout_s": 9, "prepare_mode": "paused",
}  # fmt: skip
CALLS: Final[tuple[tuple[str, tuple[Any, ...], dict[str, Any], Message], ...]] = (
    ("abort", (), {}, generation_pb2.AbortRequest()),
    ("abort", (["a", "b"],), {"all": True}, generation_pb2.AbortRequest(request_ids=["a", "b"], all=True)),
    ("detokenize", ([1, 2],), {}, generation_pb2.DetokenizeRequest(token_ids=[1, 2], skip_special_tokens=False)),
    (
        "detokenize", ([1, 2],), {"skip_special_tokens": True},
        generation_pb2.DetokenizeRequest(token_ids=[1, 2], skip_special_tokens=True),
    ),
    ("get_push", ("p",), {}, weights_pb2.GetPushRequest(push_id="p")),
    ("commit_push", ("p",), {}, weights_pb2.CommitPushRequest(push_id="p", apply=weights_pb2.ApplyOptions())),
    (
        "commit_push", ("p",), {"expected_version": 0, **APPLY_OPTIONS},
        weights_pb2.CommitPushRequest(push_id="p", expected_version=0, apply=APPLY),
    ),
    ("discard_push", ("p",), {}, weights_pb2.DiscardPushRequest(push_id="p")),
    ("discard_push", ("p",), {"force": True}, weights_pb2.DiscardPushRequest(push_id="p", force=True)),
    (
        "load_weights", (Path("/c"),), {"version": 3},
        weights_pb2.LoadWeightsRequest(
            checkpoint_path="/c", weight_version=3, action=weights_pb2.PUSH_ACTION_APPLY,
            apply=weights_pb2.ApplyOptions(),
        ),
    ),
    (
        "load_weights", (), {
            "peers": ["h:1", "h:2"], "peer_push_id": "q", "push_id": "p", "expected_version": 0, "force": True,
            "action": "stage", "staging_ttl_s": 7, "prepared_ttl_s": 8, "content_digest": "d", **APPLY_OPTIONS,
        },
        weights_pb2.LoadWeightsRequest(
            peers=weights_pb2.WeightPeers(addresses=["h:1", "h:2"], push_id="q"), push_id="p", expected_version=0,
            force=True, action=weights_pb2.PUSH_ACTION_STAGE, apply=APPLY, staging_ttl=seconds(7),
            prepared_ttl=seconds(8), content_digest="d",
        ),
    ),
    ("get_weights", (), {}, weights_pb2.GetWeightsRequest()),
    ("get_weights", (), {"include_digests": True}, weights_pb2.GetWeightsRequest(include_digests=True)),
    ("pull_weights", (), {}, weights_pb2.PullWeightsRequest(chunk_bytes=1 << 20)),
    (
        "pull_weights", (), {"version": 0, "chunk_bytes": 5},
        weights_pb2.PullWeightsRequest(weight_version=0, chunk_bytes=5),
    ),
    ("load_lora", ("a", "/b"), {}, control_pb2.LoadLoraRequest(lora_name="a", path="/b", timeout=seconds(60))),
    (
        "load_lora", ("a", Path("/b")), {"timeout_s": 7},
        control_pb2.LoadLoraRequest(lora_name="a", path="/b", timeout=seconds(7)),
    ),
    ("unload_lora", ("a",), {}, control_pb2.UnloadLoraRequest(lora_name="a")),
    ("list_loras", (), {}, control_pb2.ListLorasRequest()),
    ("list_replicas", (), {}, fleet_pb2.ListReplicasRequest()),
    ("add_replica", ("a:1",), {}, fleet_pb2.AddReplicaRequest(address="a:1")),
    ("remove_replica", ("a:1",), {}, fleet_pb2.RemoveReplicaRequest(address="a:1")),
    ("drain_replica", ("a:1",), {}, fleet_pb2.DrainReplicaRequest(address="a:1")),
    (
        "init_weight_transfer", ({"a": 1},), {"timeout_s": 7},
        weights_pb2.InitWeightTransferRequest(init_info='{"a": 1}', timeout=seconds(7)),
    ),
    (
        "start_weight_update", (),
        {
            "update_id": "u", "pause_mode": "wait", "kv_policy": "reuse", "pause_lease_id": "l", "ttl_s": 6,
            "timeout_s": 7,
        },
        weights_pb2.StartWeightUpdateRequest(
            update_id="u", pause_mode=types_pb2.PAUSE_MODE_WAIT, kv_policy=types_pb2.KV_POLICY_REUSE,
            pause_lease_id="l", ttl=seconds(6), timeout=seconds(7),
        ),
    ),
    (
        "update_weights", ({"a": 1},), {"update_id": "u", "timeout_s": 7},
        weights_pb2.UpdateWeightsRequest(update_id="u", update_info='{"a": 1}', timeout=seconds(7)),
    ),
    (
        "finish_weight_update", (), {"update_id": "u", "version": 0, "force": True, "timeout_s": 7},
        weights_pb2.FinishWeightUpdateRequest(update_id="u", weight_version=0, force=True, timeout=seconds(7)),
    ),
    ("renew_pause", ("l",), {}, control_pb2.RenewPauseRequest(lease_id="l")),
    ("renew_pause", ("l",), {"ttl_s": 6}, control_pb2.RenewPauseRequest(lease_id="l", ttl=seconds(6))),
    ("resume", (), {}, control_pb2.ResumeRequest()),
    ("resume", ("l",), {"force": True}, control_pb2.ResumeRequest(lease_id="l", force=True)),
    ("status", (), {}, control_pb2.GetStatusRequest()),
    ("server_info", (), {}, control_pb2.GetServerInfoRequest()),
    ("reset_cache", (), {}, control_pb2.ResetCacheRequest()),
    ("reset_cache", (), {"reset_running_requests": True}, control_pb2.ResetCacheRequest(reset_running_requests=True)),
)  # fmt: skip
"""The call, its arguments, what it sends."""
ELSEWHERE: Final = {
    "generate", "generate_many", "generate_as_completed", "stream", "stream_many", "tokenize", "push_weights",
    "push_lora", "pause", "paused", "sleep", "wake_up", "drain", "watch_status", "watch_replicas",
    "wait_ready", "close",
}  # fmt: skip
"""Calls whose requests are those of other tests."""


@pytest.fixture
async def daemon() -> AsyncIterator[SilentDaemon]:
    async with silent_daemon() as daemon:
        daemon.answer = b""
        yield daemon


def test_every_call_is_here_or_elsewhere() -> None:
    """A new one needs a row."""
    assert {name for name, *_ in CALLS} | ELSEWHERE == public_calls(AsyncClient)


async def test_every_argument_of_a_call_is_in_its_request(daemon: SilentDaemon) -> None:
    """In its field, and 0 is a version. What is not given is left to the daemon, but for times that the client
    needs."""
    async with AsyncClient(daemon.target) as client:
        for name, arguments, options, expected in CALLS:
            with contextlib.suppress(GenserveError):  # nothing is an answer to most of them
                await getattr(client, name)(*arguments, **options)
            assert (name, type(expected).FromString(daemon.requests[-1])) == (name, expected)
    assert len(daemon.requests) == len(CALLS)


STATE: Final = types_pb2.EngineState(instance_id="i", weight_version=5, running_requests=6, waiting_requests=7)
LEASE: Final = types_pb2.PauseLease(lease_id="l", holder="me", mode=types_pb2.PAUSE_MODE_WAIT)
PUSH: Final = weights_pb2.Push(push_id="p", received_bytes=8, total_bytes=9, missing=[{"start": 3, "end": 4}])
APPLIED: Final = weights_pb2.Applied(previous_version=1, active_version=2, requests_kept=3, requests_aborted=4)
LORA: Final = control_pb2.Lora(lora_name="a", rank=1, size_bytes=2, source="s", running_requests=3, lora_version=4)
INFO: Final = control_pb2.GetServerInfoResponse(model="m", vocab_size=3, state=STATE)
WEIGHTS: Final = weights_pb2.GetWeightsResponse(weight_version=3, resident=True, state=STATE)
IN_FLIGHT: Final = weights_pb2.PushInFlight(
    push_id="p", state=weights_pb2.PUSH_STATE_RECEIVING, weight_version=1, received_bytes=2, total_bytes=3,
    lora_name="a", num_streams=4, begin_time=Timestamp(seconds=5), state_time=Timestamp(seconds=6),
)  # fmt: skip
STATUS: Final = control_pb2.GetStatusResponse(
    state=STATE, load=control_pb2.Load(running=1, waiting=2), pushes=[IN_FLIGHT], time=Timestamp(seconds=7)
)
PUSHED: Final = weights_pb2.GetPushResponse(push=PUSH, applied=APPLIED, state=STATE)
COMMITTED: Final = weights_pb2.CommitPushResponse(push=PUSH, applied=APPLIED, state=STATE)
REPLICA: Final = fleet_pb2.Replica(
    address="a:1", state=fleet_pb2.REPLICA_STATE_SYNCING, reason="r", engine=STATE, inflight=4, max_num_seqs=8,
    push_id="p", content_digest="d", pushes=[weights_pb2.PushInFlight(push_id="q")],
)  # fmt: skip
REPLICAS: Final = fleet_pb2.ListReplicasResponse(
    replicas=[REPLICA, fleet_pb2.Replica(address="b:1")],
    weight_version=3,
    decisions=[fleet_pb2.PolicyDecisions(policy="requests", num_requests=2)],
)
ENGINE: Final = EngineState.of(STATE)
STARTED: Final = weights_pb2.StartWeightUpdateResponse(update_id="u", requests_kept=2, requests_aborted=3, state=STATE)
PAUSED: Final = control_pb2.PauseResponse(lease=LEASE, requests_kept=2, requests_aborted=3, state=STATE)
ANSWERS: Final[tuple[tuple[str, Message, Any], ...]] = (
    ("abort", generation_pb2.AbortResponse(aborted_ids=["a"], unknown_ids=["b"]), AbortResult(["a"], ["b"])),
    ("tokenize", generation_pb2.TokenizeResponse(token_ids=[1, 2]), [1, 2]),
    ("detokenize", generation_pb2.DetokenizeResponse(text="one two"), "one two"),
    ("get_push", PUSHED, PushResult.of(PUSHED)),
    ("commit_push", COMMITTED, PushResult.of(COMMITTED)),
    ("discard_push", weights_pb2.DiscardPushResponse(push=PUSH, state=STATE), Push.of(PUSH)),
    ("get_weights", WEIGHTS, ServedWeights.of(WEIGHTS)),
    ("load_lora", control_pb2.LoadLoraResponse(lora=LORA), Lora.of(LORA)),
    ("unload_lora", control_pb2.UnloadLoraResponse(lora=LORA), Lora.of(LORA)),
    ("list_loras", control_pb2.ListLorasResponse(loras=[LORA, LORA], max_loras=3), [Lora.of(LORA), Lora.of(LORA)]),
    ("list_replicas", REPLICAS, Replicas.of(REPLICAS)),
    ("add_replica", fleet_pb2.AddReplicaResponse(replica=REPLICA), FleetReplica.of(REPLICA)),
    ("remove_replica", fleet_pb2.RemoveReplicaResponse(replica=REPLICA), FleetReplica.of(REPLICA)),
    ("drain_replica", fleet_pb2.DrainReplicaResponse(replica=REPLICA), FleetReplica.of(REPLICA)),
    ("init_weight_transfer", weights_pb2.InitWeightTransferResponse(backend="nccl", state=STATE), "nccl"),
    ("start_weight_update", STARTED, StartedUpdate("u", 2, 3, ENGINE)),
    ("update_weights", weights_pb2.UpdateWeightsResponse(state=STATE), None),
    (
        "finish_weight_update", weights_pb2.FinishWeightUpdateResponse(applied=APPLIED, state=STATE),
        FinishedUpdate(Applied.of(APPLIED), ENGINE),
    ),
    ("pause", PAUSED, PauseResult(PauseLease.of(LEASE), 2, 3, ENGINE)),
    ("renew_pause", control_pb2.RenewPauseResponse(lease=LEASE, state=STATE), PauseLease.of(LEASE)),
    ("resume", control_pb2.ResumeResponse(lease_expired=True, state=STATE), ResumeResult(True, ENGINE)),
    ("resume", control_pb2.ResumeResponse(state=STATE), ResumeResult(False, ENGINE)),
    ("status", STATUS, Status.of(STATUS)),
    ("server_info", INFO, ServerInfo.of(INFO)),
    ("reset_cache", control_pb2.ResetCacheResponse(reset=True, state=STATE), True),
    ("reset_cache", control_pb2.ResetCacheResponse(state=STATE), False),
    ("sleep", control_pb2.SleepResponse(state=STATE), ENGINE),
    ("wake_up", control_pb2.WakeUpResponse(state=STATE), ENGINE),
    ("drain", control_pb2.DrainResponse(state=STATE), ENGINE),
)  # fmt: skip
"""The call, what the daemon answers, the result. What the parts of a result are made of, `test_round_trip` knows."""


async def test_every_answer_is_the_result_of_its_call(daemon: SilentDaemon) -> None:
    """Each part in its place."""
    async with AsyncClient(daemon.target) as client:
        for name, answer, expected in ANSWERS:
            daemon.answer = answer.SerializeToString()
            assert (name, await getattr(client, name)(*ARGUMENTS[name])) == (name, expected)


def test_a_push_in_flight_is_read_field_by_field() -> None:
    """With times in UTC, or none where the daemon tells none."""
    begun, since = (datetime(1970, 1, 1, 0, 0, second, tzinfo=UTC) for second in (5, 6))
    assert PushInFlight.of(IN_FLIGHT) == PushInFlight("p", "receiving", 1, 2, 3, "a", 4, begun, since)
    nameless = PushInFlight.of(weights_pb2.PushInFlight())
    assert (nameless.begin_time, nameless.state_time) == (None, None)
    assert Status.of(STATUS).time == datetime(1970, 1, 1, 0, 0, 7, tzinfo=UTC)
    assert [push.push_id for push in FleetReplica.of(REPLICA).pushes] == ["q"]


def test_the_time_of_a_status_is_no_difference() -> None:
    """Who waits for a change compares them."""
    later = control_pb2.GetStatusResponse()
    later.CopyFrom(STATUS)
    later.time.seconds += 1
    assert Status.of(later) == Status.of(STATUS)


def test_results_compare_by_content_and_print_without_their_messages() -> None:
    """Whichever call has told it."""
    watched = control_pb2.WatchStatusResponse(
        state=STATUS.state, load=STATUS.load, pushes=STATUS.pushes, time=STATUS.time
    )
    pushed = weights_pb2.PushWeightsResponse(push=PUSH, applied=APPLIED, state=STATE)
    for one, other in ((Status.of(STATUS), Status.of(watched)), (PushResult.of(PUSHED), PushResult.of(pushed))):
        assert one.message != other.message
        assert one == other
        assert repr(one) == repr(other) and "message" not in repr(one)
    renewal: Any = object()
    one_pause, other_pause = (HeldPause("l", "me", "keep", None, "", each) for each in (renewal, object()))  # type: ignore
    assert one_pause == other_pause and "renewal" not in repr(one_pause)
    assert repr(PulledWeights(3, {"w": renewal})) == "PulledWeights(weight_version=3)"
