"""What sleeps on all replicas."""

from genserve.fleet.deadlines import WAKE_S, pause_s
from genserve.fleet.everywhere import of_all
from genserve.fleet.fleet import Fleet
from genserve.fleet.records import write_record
from genserve.fleet.upstream import Upstream
from genserve.rpc.convert.control import sleep_arguments
from genserve.v1 import control_pb2


class FleetSleeps:
    """Puts all replicas that answer to sleep, and wakes them up."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def sleep(self, request: control_pb2.SleepRequest) -> None:
        """Releases the memory of all; if one of them fails, those that fell asleep wake up again."""
        fleet, limit_s = self._fleet, pause_s(request)
        await fleet.until_known()
        awake: list[Upstream] = []

        async def sleep_one(upstream: Upstream) -> control_pb2.SleepResponse:
            if upstream.member.engine is not None and not upstream.member.engine.asleep_tags:
                awake.append(upstream)
            return await upstream.ask(upstream.control.Sleep, request, limit_s)

        async def undo(upstream: Upstream) -> None:
            if upstream in awake:
                await upstream.ask(upstream.control.WakeUp, control_pb2.WakeUpRequest(), WAKE_S)

        _, depth, _ = sleep_arguments(request)
        with fleet.changing_sleep(lambda before: before.after_sleep(depth)):
            await of_all(fleet, sleep_one, undo)
        fleet.changed()
        await write_record(fleet)

    async def wake_up(self, request: control_pb2.WakeUpRequest) -> None:
        """Wakes all up."""
        fleet = self._fleet
        await fleet.until_known()
        with fleet.changing_sleep(lambda before: before.after_wake_up(request.tags)):
            await of_all(fleet, lambda each: each.ask(each.control.WakeUp, request, WAKE_S))
        fleet.changed()
        await write_record(fleet)
