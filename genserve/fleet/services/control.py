"""ControlService of a router: what a call does to one daemon, it does to all replicas."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from genserve.errors import GenserveError, UnsupportedError
from genserve.fleet.deadlines import ASK_S, RESET_S, WAKE_S, load_lora_s, pause_s
from genserve.fleet.everywhere import everywhere, told_by
from genserve.fleet.pauses import FleetPauses
from genserve.fleet.records import write_record
from genserve.fleet.router import Router
from genserve.fleet.upstream import Upstream
from genserve.fleet.watch import ROUTER_FEATURE
from genserve.rpc.convert.control import (
    StatusT,
    drain_timeout_s,
    sleep_arguments,
    watch_heartbeat_s,
    watch_interval_s,
)
from genserve.rpc.convert.listening import ListeningFacts, tell_listening
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
        tell_listening(info, self._listening)
        return self._with_state(info)

    async def Sleep(
        self, request: control_pb2.SleepRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.SleepResponse:
        """Releases the memory of all; if one of them fails, those that fell asleep wake up again."""
        await self._fleet.until_known()
        limit_s = pause_s(request)
        awake = [
            each
            for each in self._fleet.answering
            if each.member.engine is not None and not each.member.engine.asleep_tags
        ]

        async def undo(upstream: Upstream) -> None:
            if upstream in awake:
                await upstream.ask(upstream.control.WakeUp, control_pb2.WakeUpRequest(), WAKE_S)

        with self._fleet.desired.changing_sleep():
            await self._of_all(lambda each: each.ask(each.control.Sleep, request, limit_s), undo)
            _, depth, _ = sleep_arguments(request)
            self._fleet.desired.asleep = self._fleet.desired.asleep.after_sleep(depth)
        self._fleet.changed()
        await write_record(self._fleet)
        return self._with_state(control_pb2.SleepResponse())

    async def WakeUp(
        self, request: control_pb2.WakeUpRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.WakeUpResponse:
        """Wakes all up."""
        await self._fleet.until_known()
        desired = self._fleet.desired
        with desired.changing_sleep():
            await self._of_all(lambda each: each.ask(each.control.WakeUp, request, WAKE_S))
            desired.asleep = desired.asleep.after_wake_up(request.tags)
        self._fleet.changed()
        await write_record(self._fleet)
        return self._with_state(control_pb2.WakeUpResponse())

    async def ResetCache(
        self, request: control_pb2.ResetCacheRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.ResetCacheResponse:
        """Drops the prefix caches of all."""
        answers = await self._of_all(lambda each: each.ask(each.control.ResetCache, request, RESET_S))
        return self._with_state(control_pb2.ResetCacheResponse(reset=all(answer.reset for answer in answers)))

    async def LoadLora(
        self, request: control_pb2.LoadLoraRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.LoadLoraResponse:
        """Loads an adapter on all, from the same path on each host; if one fails, the others unload it again, unless
        they had one of this name."""
        await self._fleet.until_known()
        limit_s = load_lora_s(request)
        had = {each for each in self._fleet.answering if request.lora_name in (each.member.lora_names or ())}

        async def undo(upstream: Upstream) -> None:
            if upstream not in had:
                unload = control_pb2.UnloadLoraRequest(lora_name=request.lora_name)
                await upstream.ask(upstream.control.UnloadLora, unload, ASK_S)

        desired, name = self._fleet.desired, request.lora_name
        pushed = desired.pushed_loras.pop(name, None)  # or it would be brought back meanwhile
        try:
            answers = await self._of_all(lambda each: each.ask(each.control.LoadLora, request, limit_s), undo)
        except BaseException:
            if pushed is not None:
                desired.pushed_loras[name] = pushed
            raise
        desired.loras[name] = request.path
        self._fleet.changed()
        await write_record(self._fleet)
        return self._with_state(control_pb2.LoadLoraResponse(lora=_together([answer.lora for answer in answers])))

    async def UnloadLora(
        self, request: control_pb2.UnloadLoraRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.UnloadLoraResponse:
        """Removes an adapter from all."""
        await self._fleet.until_known()
        self._fleet.forget_lora(request.lora_name)  # first: who has done it must not load it again
        answers = await self._of_all(lambda each: each.ask(each.control.UnloadLora, request, ASK_S))
        await write_record(self._fleet)
        return self._with_state(control_pb2.UnloadLoraResponse(lora=_together([answer.lora for answer in answers])))

    async def ListLoras(
        self, request: control_pb2.ListLorasRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.ListLorasResponse:
        """The adapters that all replicas have."""
        answers = await self._of_all(lambda each: each.ask(each.control.ListLoras, request, ASK_S))
        by_name = [{lora.lora_name: lora for lora in answer.loras} for answer in answers]
        names = sorted(set.intersection(*(set(each) for each in by_name)))
        return self._with_state(
            control_pb2.ListLorasResponse(
                loras=[_together([each[name] for each in by_name]) for name in names],
                max_loras=min(answer.max_loras for answer in answers),
            )
        )

    async def Drain(
        self, request: control_pb2.DrainRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.DrainResponse:
        """Begins the shutdown of the router itself."""
        self._stop("Drain", drain_timeout_s(request))
        self._router.refuse()
        return self._with_state(control_pb2.DrainResponse())

    async def _of_all(
        self, ask: Callable[[Upstream], Awaitable[T]], undo: Callable[[Upstream], Awaitable[None]] | None = None
    ) -> list[T]:
        """The answers of all replicas. If one fails, `undo` is called for those that did not, and its error raised."""
        replicas = self._fleet.answering
        if not replicas:
            raise self._fleet.none_ready()

        async def answer(upstream: Upstream) -> T:
            answered = await ask(upstream)
            if upstream.member.engine is not None:
                # Its next report comes later. One that comes while others are still asked is newer than this.
                upstream.member.engine = answered.state  # type: ignore[attr-defined]
            return answered

        outcomes = await everywhere(replicas, answer)
        failures = [(up, outcome) for up, outcome in outcomes.items() if isinstance(outcome, GenserveError)]
        if failures:
            done = [up for up, outcome in outcomes.items() if not isinstance(outcome, GenserveError)]
            if undo is not None:
                await asyncio.shield(everywhere(done, undo))
            upstream, error = failures[0]
            raise told_by(upstream, error)
        return [outcome for outcome in outcomes.values() if not isinstance(outcome, GenserveError)]

    def _with_state(self, answer: T) -> T:
        answer.state.CopyFrom(self._router.state())  # type: ignore[attr-defined]
        return answer


def _together(loras: list[control_pb2.Lora]) -> control_pb2.Lora:
    """An adapter of all replicas."""
    lora = control_pb2.Lora()
    lora.CopyFrom(loras[0])
    lora.running_requests = sum(each.running_requests for each in loras)
    lora.lora_version = min(each.lora_version for each in loras)
    return lora
