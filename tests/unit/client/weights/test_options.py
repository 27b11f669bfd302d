"""What is sent of a push without options, and that each option changes what it says."""

from typing import Any

import pytest
import torch

from genserve.client import AsyncClient
from genserve.client.weights.options import Delivery, apply_message, push_header
from genserve.errors import InvalidFieldError
from genserve.v1 import types_pb2, weights_pb2
from tests.support.refusals import refuses


def test_one_stream_sends_checked_mebibytes_unless_asked_otherwise() -> None:
    """As the documentation of the options says."""
    assert Delivery.of({}, 1) == Delivery(1, 1, 1 << 20, True, None)

    def progress(_: object) -> None:
        """Called by nobody."""

    options = {"streams": 2, "chunk_bytes": 5, "checksum": False, "progress": progress}
    assert Delivery.of(options, 3) == Delivery(3, 2, 5, False, progress)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "num_callers", "field"),
    [({"streams": 0}, 1, "streams"), ({"chunk_bytes": 0}, 1, "chunk_bytes"), ({}, 0, "callers")],
)
def test_what_is_no_number_of_something_is_named(options: dict[str, int], num_callers: int, field: str) -> None:
    """By the option."""
    with refuses(InvalidFieldError, field=field):
        Delivery.of(options, num_callers)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["finite", "checksum", "shared_memory"])
@pytest.mark.parametrize("value", ["yes", "", 1, [True]])
async def test_what_is_neither_true_nor_false_is_named(option: str, value: object) -> None:
    """Python would take any text for true."""
    options: Any = {option: value}
    async with AsyncClient("127.0.0.1:1") as client:
        with refuses(InvalidFieldError, field=option):
            await client.push_weights({"a": torch.ones(1)}, version=1, timeout_s=0.0, **options)


def test_a_header_without_options_leaves_everything_to_the_daemon() -> None:
    """Except that it is to be applied."""
    manifest, apply = weights_pb2.Manifest(), weights_pb2.ApplyOptions()
    expected = weights_pb2.PushHeader(
        weight_version=3, manifest=manifest, apply=apply, action=weights_pb2.PUSH_ACTION_APPLY
    )
    assert push_header(3, {}) == expected


def test_an_option_that_its_field_cannot_hold_is_named_once() -> None:
    """By the path of the field, and as the caller has written it if that differs."""
    with refuses(InvalidFieldError, field="header.weight_version", says="version='2'"):
        push_header("2", {})  # type: ignore[arg-type]
    with refuses(InvalidFieldError, field="header.push_id", says=" 3: "):
        push_header(2, {"push_id": 3})  # type: ignore[typeddict-item]


def test_every_option_of_a_header_has_its_field() -> None:
    """Times are durations, words are values of enums."""
    header = push_header(
        3,
        {
            "push_id": "p", "attempt": "a", "action": "stage", "partial": True, "force": True, "expected_version": 0,
            "staging_ttl_s": 1.5, "pause_mode": "wait", "kv_policy": "reuse", "pause_lease_id": "l",
            "apply_timeout_s": 2.5, "prepare_mode": "paused", "prepared_ttl_s": 3.5, "content_digest": "c",
        },
    )  # fmt: skip
    assert (header.push_id, header.attempt, header.manifest.partial, header.force) == ("p", "a", True, True)
    assert header.HasField("expected_version") and header.expected_version == 0
    assert (header.prepared_ttl.ToMilliseconds(), header.content_digest) == (3500, "c")
    assert (header.action, header.staging_ttl.ToMilliseconds()) == (weights_pb2.PUSH_ACTION_STAGE, 1500)
    assert (header.apply.pause_mode, header.apply.kv_policy) == (
        types_pb2.PAUSE_MODE_WAIT,
        types_pb2.KV_POLICY_REUSE,
    )
    assert (header.apply.pause_lease_id, header.apply.timeout.ToMilliseconds()) == ("l", 2500)
    assert header.apply.prepare_mode == weights_pb2.PREPARE_MODE_PAUSED


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"pause_mode": "kept"}, "apply.pause_mode"),
        ({"kv_policy": "drop"}, "apply.kv_policy"),
        ({"prepare_mode": "fast"}, "apply.prepare_mode"),
        ({"apply_timeout_s": "1"}, "apply.apply_timeout_s"),
        ({"pause_lease_id": 1}, "apply.pause_lease_id"),
    ],
)
def test_a_wrong_option_is_named_by_its_place(options: dict[str, object], field: str) -> None:
    """In the request that it would have been in."""
    with refuses(InvalidFieldError, field=field):
        apply_message(options, field="apply")  # type: ignore[arg-type]
