"""ControlService."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from genserve.control.conditions import DaemonCondition
from genserve.control.pause import PauseController
from genserve.control.sleep import SleepController
from genserve.control.state import StateBoard
from genserve.engine.protocol import Engine
from genserve.rpc.convert.control import (
    DEFAULT_PAUSE_TIMEOUT_S,
    ServerFacts,
    drain_timeout_s,
    fleet_record,
    load_timeout_s,
    renewed_ttl_s,
    sleep_arguments,
    to_lora,
    to_server_info,
)
from genserve.rpc.convert.values import (
    KV_POLICIES_OF_PAUSES,
    PAUSE_MODES,
    member_of,
    pause_ttl_s,
    seconds_or,
    to_lease,
    to_state,
)
from genserve.rpc.services import router_id_of
from genserve.rpc.status_answers import StatusAnswers
from genserve.v1 import control_pb2
from genserve.v1.control_pb2_grpc import ControlServiceServicer
from genserve.weights.lora.loader import LoraLoader
from genserve.weights.registry import PushRegistry

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

RESET_TIMEOUT_S = 60.0


class ControlServicer(StatusAnswers, ControlServiceServicer):  # type: ignore[misc]  # the stubs know generators only
    """Operates the engine."""

    def __init__(
        self,
        engine: Engine,
        pauses: PauseController,
        sleeps: SleepController,
        board: StateBoard,
        loras: LoraLoader,
        pushes: PushRegistry,
        facts: Callable[[], ServerFacts],
        stop: Callable[[str, float | None], None],
    ) -> None:
        """`stop`: ends the process in order; it takes the cause, and the time for what runs, as `Stopped.stop`."""
        super().__init__(board, pushes.live.in_flight)
        self._engine = engine
        self._loras = loras
        self._pauses = pauses
        self._sleeps = sleeps
        self._board = board
        self._facts = facts
        self._stop = stop

    async def Pause(
        self, request: control_pb2.PauseRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.PauseResponse:
        """Pauses under a lease."""
        lease = await self._pauses.pause(
            member_of(PAUSE_MODES, request.mode, "mode"),
            member_of(KV_POLICIES_OF_PAUSES, request.kv_policy, "kv_policy"),
            holder=request.holder,
            ttl_s=pause_ttl_s(request),
            request_id=request.request_id,
            fleet_lease_id=request.fleet_lease_id,
            timeout_s=seconds_or(request, "timeout", DEFAULT_PAUSE_TIMEOUT_S),
        )
        return control_pb2.PauseResponse(
            lease=to_lease(lease),
            requests_kept=lease.counts.kept,
            requests_aborted=lease.counts.aborted,
            state=to_state(self._board.state()),
        )

    async def RenewPause(
        self, request: control_pb2.RenewPauseRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.RenewPauseResponse:
        """Extends a lease."""
        lease = self._pauses.renew(request.lease_id, renewed_ttl_s(request))
        return control_pb2.RenewPauseResponse(lease=to_lease(lease), state=to_state(self._board.state()))

    async def Resume(
        self, request: control_pb2.ResumeRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.ResumeResponse:
        """Ends a lease."""
        lease_expired = await self._pauses.resume(request.lease_id, force=request.force)
        return control_pb2.ResumeResponse(lease_expired=lease_expired, state=to_state(self._board.state()))

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.GetServerInfoResponse:
        """What is served."""
        answer = to_server_info(self._engine.info, self._facts(), self._board.state())
        if (record := self._board.membership.record).epoch:
            answer.fleet.MergeFromString(record.content)
        return answer

    async def SetFleetState(
        self, request: control_pb2.SetFleetStateRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.SetFleetStateResponse:
        """Keeps what the fleet should be."""
        self._board.membership.keep(router_id_of(context), fleet_record(request.fleet))
        return control_pb2.SetFleetStateResponse(state=to_state(self._board.state()))

    async def Sleep(
        self, request: control_pb2.SleepRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.SleepResponse:
        """Releases the device's memory."""
        mode, depth, timeout_s = sleep_arguments(request)
        await self._sleeps.sleep(mode, depth, timeout_s)
        return control_pb2.SleepResponse(state=to_state(self._board.state()))

    async def WakeUp(
        self, request: control_pb2.WakeUpRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.WakeUpResponse:
        """Ends a sleep, or a part of it."""
        await self._sleeps.wake_up(request.tags)
        return control_pb2.WakeUpResponse(state=to_state(self._board.state()))

    async def LoadLora(
        self, request: control_pb2.LoadLoraRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.LoadLoraResponse:
        """Loads an adapter from a directory."""
        lora = await self._loras.load_directory(request.lora_name, request.path, load_timeout_s(request))
        return control_pb2.LoadLoraResponse(lora=to_lora(lora), state=to_state(self._board.state()))

    async def UnloadLora(
        self, request: control_pb2.UnloadLoraRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.UnloadLoraResponse:
        """Removes an adapter."""
        lora = self._loras.unload(request.lora_name)
        return control_pb2.UnloadLoraResponse(lora=to_lora(lora), state=to_state(self._board.state()))

    async def ListLoras(
        self, request: control_pb2.ListLorasRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.ListLorasResponse:
        """The adapters."""
        return control_pb2.ListLorasResponse(
            loras=[to_lora(lora) for lora in self._engine.loras.loaded()],
            max_loras=self._engine.info.max_loras,
            state=to_state(self._board.state()),
        )

    async def ResetCache(
        self, request: control_pb2.ResetCacheRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.ResetCacheResponse:
        """Drops the prefix cache."""
        reset = await self._engine.reset_prefix_cache(request.reset_running_requests, RESET_TIMEOUT_S)
        return control_pb2.ResetCacheResponse(reset=reset, state=to_state(self._board.state()))

    async def Drain(
        self, request: control_pb2.DrainRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.DrainResponse:
        """Begins the shutdown, before this call has ended. A router calls a daemon that shuts down already: what that
        serves is not needed any more."""
        if router_id := router_id_of(context):
            self._board.membership.let_go(router_id)
        self._stop("Drain", drain_timeout_s(request))
        self._board.become(DaemonCondition.DRAINING)
        return control_pb2.DrainResponse(state=to_state(self._board.state()))
