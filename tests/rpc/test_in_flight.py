"""The pushes in flight in the status, as a client on the wire sees them."""

import asyncio
import time

from google.protobuf.duration_pb2 import Duration

from genserve.v1 import control_pb2, weights_pb2
from genserve.weights.push.types import PushHeader
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S
from tests.support.scripted_daemon import CHECKPOINT, Daemon

HEADER = PushHeader("p", 1, manifest=CHECKPOINT.as_manifest())


async def test_a_status_lists_the_pushes_in_flight_by_the_clock_of_the_daemon(daemon: Daemon) -> None:
    """A watcher is told at once of one that is opened, long before its interval is over; and when it is gone."""
    before_ns = time.time_ns()
    watch = daemon.control.WatchStatus(control_pb2.WatchStatusRequest(interval=Duration(seconds=60)), timeout=20)
    assert not (await watch.read()).pushes
    stream = await daemon.registry.open(HEADER)
    (opened,) = (await asyncio.wait_for(watch.read(), STEP_S)).pushes
    assert (opened.push_id, opened.state) == ("p", weights_pb2.PUSH_STATE_RECEIVING)
    stream.write(0, bytes(8), None)
    status = await daemon.control.GetStatus(control_pb2.GetStatusRequest())
    (push,) = status.pushes
    assert (push.received_bytes, push.total_bytes, push.weight_version, push.num_streams) == (8, 32, 1, 1)
    begun_ns, since_ns, now_ns = (each.ToNanoseconds() for each in (push.begin_time, push.state_time, status.time))
    assert before_ns < min(begun_ns, since_ns) < max(begun_ns, since_ns) < now_ns < time.time_ns()
    stream.detach()
    daemon.registry.discard("p")
    while (await asyncio.wait_for(watch.read(), STEP_S)).pushes:
        pass


async def test_bytes_that_arrive_are_told_at_the_interval(daemon: Daemon) -> None:
    """As a changed load is; the time of a status alone is nothing to tell."""
    stream = await daemon.registry.open(HEADER)
    watch = daemon.control.WatchStatus(control_pb2.WatchStatusRequest(interval=Duration(nanos=100_000_000)), timeout=20)
    assert (await watch.read()).pushes[0].received_bytes == 0
    stream.write(0, bytes(8), None)
    assert (await watch.read()).pushes[0].received_bytes == 8
    third = asyncio.create_task(watch.read())
    with advanced_clock() as clock:
        for _ in range(5):
            await clock.advance(0.1)
        await daemon.control.GetStatus(control_pb2.GetStatusRequest())  # comes after what was told
        assert not third.done()
    third.cancel()
    stream.detach()
