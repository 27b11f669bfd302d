"""What was measured, and how fast pushes arrive."""

import pytest

from genserve.cli.top.screen import MAX_SAMPLES, MAX_SHOWN, WINDOW_S, History, Sample, Transfers
from genserve.client import PushInFlight
from genserve.v1 import weights_pb2
from tests.unit.cli.top.screens import MB, pushing

STAGED = weights_pb2.PUSH_STATE_STAGED
PREPARING = weights_pb2.PUSH_STATE_PREPARING


def in_flight(
    received_mb: int, push_id: str = "p", state: weights_pb2.PushState.ValueType | None = None
) -> PushInFlight:
    """A push of 400 MB."""
    kind = weights_pb2.PUSH_STATE_RECEIVING if state is None else state
    return PushInFlight.of(pushing(push_id, received_mb=received_mb, state=kind))


def told(transfers: Transfers, now_s: float, *pushes: PushInFlight, mean: float | None = None) -> list[str]:
    """The ids of those that are gone."""
    return [each.push.push_id for each in transfers.told(pushes, [mean] * len(pushes), now_s)]


def test_a_history_forgets_the_oldest() -> None:
    """It never grows beyond its length; what was not known is a gap."""
    history = History()
    for number in range(MAX_SAMPLES + 2):
        history.add(Sample(tokens_per_s=float(number)))
    assert len(history) == MAX_SAMPLES
    assert history.of("tokens_per_s")[0] == 2.0
    assert set(history.of("waiting")) == {None}


def test_a_rate_is_that_of_the_last_seconds() -> None:
    """A push that stalls is seen to stall, whatever its mean is."""
    transfers = Transfers()
    told(transfers, 0.0, in_flight(0), mean=5.0 * MB)
    assert transfers.shown[0].rate == 5.0 * MB
    told(transfers, 1.0, in_flight(100))
    assert transfers.shown[0].rate == 100 * MB
    told(transfers, 1.0 + WINDOW_S, in_flight(100))
    assert transfers.shown[0].rate == 0.0


def test_a_rate_forgets_what_is_older() -> None:
    """A push that was fast for long and is slow now is slow; two answers at one time tell no rate."""
    transfers = Transfers()
    for second, received_mb in enumerate((0, 100, 200, 300, 310, 320)):
        told(transfers, float(second), in_flight(received_mb))
    assert transfers.shown[0].rate == 10 * MB
    told(transfers, 5.5, in_flight(325))
    assert transfers.shown[0].rate == pytest.approx(10 * MB)
    transfers = Transfers()
    told(transfers, 1.0, in_flight(100), mean=7.0)
    told(transfers, 1.0, in_flight(200))
    assert transfers.shown[0].rate == 7.0


def test_a_received_push_keeps_the_mean_rate_of_its_bytes() -> None:
    """Nothing arrives while it is prepared, and that is no stall."""
    transfers = Transfers()
    told(transfers, 0.0, in_flight(200), mean=80.0)
    told(transfers, 1.0, in_flight(400, state=PREPARING), mean=70.0)
    assert transfers.shown[0].rate == 80.0


def test_a_new_attempt_begins_anew() -> None:
    """Its bytes count from nothing, and the rate is not negative."""
    transfers = Transfers()
    told(transfers, 0.0, in_flight(300), mean=9.0)
    told(transfers, 1.0, in_flight(100))
    assert transfers.shown[0].rate is None
    assert transfers.arrived_bytes == 400 * MB


def test_all_arrived_bytes_are_counted_once() -> None:
    """Also those of the last moment of a push that was applied, which nobody has told; not those that were there."""
    transfers = Transfers()
    told(transfers, 0.0, in_flight(100), in_flight(400, "old", STAGED))
    assert transfers.arrived_bytes == 100 * MB
    told(transfers, 1.0, in_flight(300), in_flight(400, "old", STAGED))
    assert transfers.arrived_bytes == 300 * MB
    (gone,) = transfers.told([in_flight(400, "old", STAGED)], [None], 2.0)
    transfers.ended(gone)
    assert (gone.push.push_id, transfers.arrived_bytes) == ("p", 400 * MB)


def test_pushes_stay_in_the_order_in_which_they_are_reported() -> None:
    """And those that are gone are told once."""
    transfers = Transfers()
    assert told(transfers, 0.0, in_flight(1, "a"), in_flight(1, "b")) == []
    assert told(transfers, 1.0, in_flight(1, "c"), in_flight(1, "b")) == ["a"]
    assert [each.push.push_id for each in transfers.shown] == ["c", "b"]


def test_a_daemon_that_tells_of_too_many_fills_no_memory() -> None:
    """Nor does one that tells of a push very often."""
    transfers = Transfers()
    for moment in range(300):
        told(transfers, moment / 1000, *(in_flight(moment, f"p{number}") for number in range(MAX_SHOWN + 9)))
    assert len(transfers.shown) == MAX_SHOWN
    assert max(len(each.points) for each in transfers.shown) <= 64
