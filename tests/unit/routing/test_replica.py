"""What a sender makes of a report that is late."""

import pytest

from genserve.routing.replica import Load, Request
from tests.unit.routing.fleets import replica


def test_outstanding_counts_own_requests_now_and_others_as_reported() -> None:
    """Ten at the replica, of which four were this sender's. Since then it has sent two more, or all four have ended."""
    load = Load(running=8, waiting=2, inflight_at_report=4)
    assert replica(load=load, inflight=6).outstanding == 12
    assert replica(load=load, inflight=0).outstanding == 6
    assert replica(load=Load(running=3)).outstanding == 3


def test_a_request_that_is_under_way_when_the_report_is_made_counts_once() -> None:
    """The report has not seen it yet: it is no negative number of others' requests."""
    assert replica(load=Load(running=1, inflight_at_report=3), inflight=3).outstanding == 3


def test_kv_pressure_carries_the_report_on_by_what_was_sent_since() -> None:
    """Each sequence takes its share of a full batch, and what has ended gives it back."""
    load = Load(kv_usage=0.5, inflight_at_report=8)
    assert replica(load=load, inflight=16, max_num_seqs=32).kv_pressure == 0.75
    assert replica(load=load, inflight=8).kv_pressure == 0.5
    assert replica(load=Load(kv_usage=0.1, inflight_at_report=8), inflight=0).kv_pressure == 0.0


def test_what_cannot_be_is_refused() -> None:
    """A negative load would attract every request."""
    with pytest.raises(ValueError, match=r"inflight .*-1"):
        replica(inflight=-1)
    with pytest.raises(ValueError, match=r"max_num_seqs .*0"):
        replica(max_num_seqs=0)
    with pytest.raises(ValueError, match=r"num_sequences .*0"):
        Request(num_sequences=0)
