"""How long replicas may take to answer."""

import re
from pathlib import Path

import pytest

from genserve import fleet
from genserve.fleet.deadlines import ASK_S, apply_s, load_lora_s, pause_s, prepared_ttl_s
from genserve.v1 import control_pb2, weights_pb2
from genserve.wire.conversions import duration_of

_CALL = re.compile(r"\.(?:weights|control|generation)\.[A-Z]\w+\(")
_WATCHED = "upstream.control.WatchStatus("


def test_no_call_goes_to_a_replica_without_a_deadline() -> None:
    """`Upstream.ask` demands one. Each report of a watch has its own."""
    assert fleet.__file__ is not None
    found = [
        line.strip()
        for path in Path(fleet.__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if _CALL.search(line)
    ]
    assert len(found) == 1 and _WATCHED in found[0]


@pytest.mark.parametrize(("asked_s", "expected_s"), [(None, 330.0), (0.0, 330.0), (7.0, 37.0)])
def test_a_push_has_the_time_that_its_header_gives_it(asked_s: float | None, expected_s: float) -> None:
    """And some, for the replica's own error; by default the daemon's time."""
    timeout = None if asked_s is None else duration_of(asked_s)
    assert apply_s(weights_pb2.ApplyOptions(timeout=timeout)) == expected_s


def test_others_have_the_daemons_defaults() -> None:
    """A pause and a sleep, an adapter, and a version that is prepared."""
    assert pause_s(control_pb2.PauseRequest()) == pause_s(control_pb2.SleepRequest()) == 60 + ASK_S
    assert pause_s(control_pb2.PauseRequest(timeout=duration_of(3))) == 3 + ASK_S
    assert load_lora_s(control_pb2.LoadLoraRequest()) == 60 + ASK_S
    assert load_lora_s(control_pb2.LoadLoraRequest(timeout=duration_of(4))) == 4 + ASK_S
    assert prepared_ttl_s(weights_pb2.PushHeader()) == 60
    assert prepared_ttl_s(weights_pb2.PushHeader(prepared_ttl=duration_of(5))) == 5
