"""The table of `genserve status`."""

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from genserve.cli.status import status_table
from genserve.client import ServerInfo, Status
from genserve.v1 import control_pb2, types_pb2, weights_pb2

INFO = ServerInfo.of(control_pb2.GetServerInfoResponse(model="smol", weight_update="beside"))
PUSHES = [
    weights_pb2.PushInFlight(
        push_id="p", state=weights_pb2.PUSH_STATE_RECEIVING, weight_version=3, received_bytes=1_000_000_000,
        total_bytes=4_000_000_000, begin_time=Timestamp(seconds=100),
    ),
    weights_pb2.PushInFlight(push_id="q", state=weights_pb2.PUSH_STATE_STAGED, lora_name="poet"),
    weights_pb2.PushInFlight(push_id="r", state=weights_pb2.PUSH_STATE_STAGED, lora_name="poet", weight_version=7),
]  # fmt: skip
LEASE = types_pb2.PauseLease(
    lease_id="l", holder="me", mode=types_pb2.PAUSE_MODE_WAIT, expire_time=Timestamp(seconds=130)
)


def table(status: control_pb2.GetStatusResponse, now_s: float) -> list[str]:
    """Its last rows, on a machine where it is this time."""
    return status_table(Status.of(status), INFO, datetime.fromtimestamp(now_s, UTC)).splitlines()[6:]


def test_a_status_shows_the_pushes_in_flight_by_the_clock_of_the_daemon() -> None:
    """How far each has come, and how fast; of one that is not sent, what it waits for. Clocks of hosts differ."""
    state = types_pb2.EngineState(pauses=[LEASE])
    status = control_pb2.GetStatusResponse(state=state, pushes=PUSHES, time=Timestamp(seconds=102))
    assert table(status, 5000.0) == [
        "pause    l  wait  28 s left  me",
        "push     p  version 3  receiving  25%  1.00/4.00 GB  0.50 GB/s",
        "push     q  adapter poet  staged",
        "push     r  adapter poet  version 7  staged",
    ]


def test_without_a_clock_of_the_daemon_that_of_this_machine_counts() -> None:
    """As before daemons told theirs."""
    state = types_pb2.EngineState(pauses=[LEASE])
    assert table(control_pb2.GetStatusResponse(state=state), 120.0) == ["pause    l  wait  10 s left  me"]
