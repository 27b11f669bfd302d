"""What the calls of both services send: with every argument, and with none that may be left out."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from genserve.client import AsyncClient
from genserve.errors import GenserveError
from genserve.v1 import control_pb2, generation_pb2, types_pb2, weights_pb2
from tests.unit.client.call_table import public_calls
from tests.unit.client.silent_daemon import SilentDaemon, silent_daemon


def seconds(number: int) -> Duration:
    """As a message has them."""
    return Duration(seconds=number)


APPLY: Final = weights_pb2.ApplyOptions(
    pause_mode=types_pb2.PAUSE_MODE_WAIT, kv_policy=types_pb2.KV_POLICY_REUSE, pause_lease_id="l", timeout=seconds(9)
)
APPLY_OPTIONS: Final = {"pause_mode": "wait", "kv_policy": "reuse", "pause_lease_id": "l", "apply_timeout_s": 9}
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
    "push_lora", "pause", "paused", "sleep", "wake_up", "watch_status", "wait_ready", "close",
}  # fmt: skip
"""Calls whose requests are those of other tests."""


@pytest.fixture
async def daemon() -> AsyncIterator[SilentDaemon]:
    async with silent_daemon() as daemon:
        daemon.answers = True
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
