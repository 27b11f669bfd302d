"""ControlService of a router: what a call does to one daemon, it does to all replicas."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from genserve.errors import UnsupportedError
from genserve.fleet.everywhere import of_all
from genserve.fleet.pauses import FleetPauses, FleetSleeps
from genserve.fleet.push.adapters import FleetLoras
from genserve.fleet.router import Router
from genserve.fleet.upstream import ASK_S, RESET_S
from genserve.fleet.watch import ROUTER_FEATURE
from genserve.rpc.convert.control import (
    StatusT,
    drain_timeout_s,
    watch_heartbeat_s,
    watch_interval_s,
)
from genserve.rpc.convert.listening import ListeningFacts, set_listening
from genserve.rpc.convert.values import to_timestamp
from genserve.rpc.watchers import Watchers
from genserve.v1 import control_pb2
from genserve.v1.control_pb2_grpc import ControlServiceServicer

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

T = TypeVar("T")


class FleetControl(ControlServiceServicer):
    """Operates all replicas."""

    def __init__(self, router: Router, listening: ListeningFacts, stop: Callable[[str, float | None], None]) -> None:
        """`listening`: of the router's own ports. `stop`: ends the router, as `Stopped.stop`."""
        self._router = router
        self._listening = listening
        self._stop = stop
        self._fleet = router.fleet
        self._pauses = FleetPauses(router.fleet)
        self._sleeps = FleetSleeps(router.fleet)
        self._loras = FleetLoras(router.fleet)
        self._watchers = Watchers("the status", "end some that nobody reads, or ask GetStatus from time to time")

    async def Pause(
        self, request: control_pb2.PauseRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.PauseResponse:
        """Pauses all replicas under one lease."""
        await self._fleet.until_known()
        return self._with_state(await self._pauses.pause(request))

    async def RenewPause(
        self, request: control_pb2.RenewPauseRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.RenewPauseResponse:
        """Extends a lease."""
        await self._fleet.until_known()
        return self._with_state(await self._pauses.renew(request))

    async def Resume(
        self, request: control_pb2.ResumeRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.ResumeResponse:
        """Ends a lease."""
        await self._fleet.until_known()
        return self._with_state(await self._pauses.resume(request))

    async def GetStatus(
        self, request: control_pb2.GetStatusRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.GetStatusResponse:
        """State and load of all."""
        return self._at_this_time(self._status(control_pb2.GetStatusResponse))

    async def WatchStatus(  # type: ignore[override]  # the stubs know generators only
        self,
        request: control_pb2.WatchStatusRequest,
        context: "ServicerContext[control_pb2.WatchStatusRequest, control_pb2.WatchStatusResponse]",
    ) -> None:
        """State and load, at once and whenever they differ from the last message. Ends when the router shuts down."""
        interval_s, heartbeat_s = watch_interval_s(request), watch_heartbeat_s(request)
        sent, silent_at_s = None, math.inf
        with self._watchers.joined():
            while True:
                is_last = self._router.is_draining
                changed = self._fleet.states_changed.next
                status = self._status(control_pb2.WatchStatusResponse)
                if status != sent or time.monotonic() >= silent_at_s:
                    told = control_pb2.WatchStatusResponse()
                    told.CopyFrom(status)  # to which the time is no change
                    await context.write(self._at_this_time(told))
                    sent, silent_at_s = status, time.monotonic() + heartbeat_s
                if is_last:
                    return
                try:
                    async with asyncio.timeout(min(interval_s, max(0.0, silent_at_s - time.monotonic()))):
                        await changed.wait()
                except TimeoutError:
                    pass

    def _status(self, kind: type[StatusT]) -> StatusT:
        return kind(state=self._router.state(), load=self._router.load(), pushes=self._router.pushes())

    def _at_this_time(self, status: StatusT) -> StatusT:
        status.time.CopyFrom(to_timestamp(time.time()))
        return status

    async def SetFleetState(
        self, request: control_pb2.SetFleetStateRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.SetFleetStateResponse:
        """Refused."""
        raise UnsupportedError("a router makes this call to its replicas: use Pause, Sleep, LoadLora, and push")

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.GetServerInfoResponse:
        """What one of the replicas serves, and the router's own ports: everything goes through them."""
        upstream = self._router.any_replica()
        info = await upstream.ask(upstream.control.GetServerInfo, request, ASK_S)
        for field in ("host_id", "ingest_ports", "frontend_ports", "num_frontends_down", "openai_port"):
            info.ClearField(field)
        hidden = ("weight_transfer",)
        features = [feature for feature in info.features if feature not in hidden]
        del info.features[:]
        info.features.extend([*features, ROUTER_FEATURE])
        info.ClearField("weight_transfer")
        info.ClearField("fleet")
        if ready := self._fleet.ready:
            info.limits.max_num_seqs = sum(each.member.max_num_seqs for each in ready)
            info.limits.max_active_requests = sum(each.member.max_active_requests for each in ready)
        set_listening(info, self._listening)
        return self._with_state(info)

    async def Sleep(
        self, request: control_pb2.SleepRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.SleepResponse:
        """Releases the memory of all."""
        await self._sleeps.sleep(request)
        return self._with_state(control_pb2.SleepResponse())

    async def WakeUp(
        self, request: control_pb2.WakeUpRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.WakeUpResponse:
        """Wakes all up."""
        await self._sleeps.wake_up(request)
        return self._with_state(control_pb2.WakeUpResponse())

    async def ResetCache(
        self, request: control_pb2.ResetCacheRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.ResetCacheResponse:
        """Drops the prefix caches of all."""
        answers = await of_all(self._fleet, lambda each: each.ask(each.control.ResetCache, request, RESET_S))
        return self._with_state(control_pb2.ResetCacheResponse(reset=all(answer.reset for answer in answers)))

    async def LoadLora(
        self, request: control_pb2.LoadLoraRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.LoadLoraResponse:
        """Loads an adapter on all."""
        return self._with_state(control_pb2.LoadLoraResponse(lora=await self._loras.load(request)))

    async def UnloadLora(
        self, request: control_pb2.UnloadLoraRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.UnloadLoraResponse:
        """Removes an adapter from all."""
        return self._with_state(control_pb2.UnloadLoraResponse(lora=await self._loras.unload(request)))

    async def ListLoras(
        self, request: control_pb2.ListLorasRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.ListLorasResponse:
        """The adapters that all replicas have."""
        return self._with_state(await self._loras.all())

    async def Drain(
        self, request: control_pb2.DrainRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.DrainResponse:
        """Begins the shutdown of the router itself."""
        self._stop("Drain", drain_timeout_s(request))
        self._router.refuse()
        return self._with_state(control_pb2.DrainResponse())

    def _with_state(self, answer: T) -> T:
        answer.state.CopyFrom(self._router.state())  # type: ignore[attr-defined]
        return answer
