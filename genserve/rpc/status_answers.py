"""GetStatus and WatchStatus, which a daemon answers from its first moment to its last. Before its engine is there it
answers nothing else."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn

from google.protobuf.descriptor import ServiceDescriptor

from genserve.control.conditions import RULES, STARTING
from genserve.control.membership import RouterRun
from genserve.control.state import EngineState, StateBoard
from genserve.rpc.convert.control import to_status, watch_heartbeat_s, watch_interval_s
from genserve.rpc.handlers import method_handler
from genserve.rpc.services import ServiceTable
from genserve.rpc.watchers import Watchers
from genserve.v1 import control_pb2
from genserve.weights.push.types import PushInFlight

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

_ANSWERED = frozenset({"genserve.v1.ControlService.GetStatus", "genserve.v1.ControlService.WatchStatus"})


class StatusAnswers:
    """The two methods of ControlService that need no engine. `in_flight`: the pushes that are on their way."""

    def __init__(self, board: StateBoard, in_flight: Callable[[], tuple[PushInFlight, ...]] = tuple) -> None:
        self._board = board
        self._in_flight = in_flight
        self._watchers = Watchers("the status", "end some that nobody reads, or ask GetStatus from time to time")

    def tell_in_flight(self, in_flight: Callable[[], tuple[PushInFlight, ...]]) -> None:
        """From now on these are the pushes on their way, also for who watches already."""
        self._in_flight = in_flight

    async def GetStatus(
        self, request: control_pb2.GetStatusRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.GetStatusResponse:
        """State and load."""
        return to_status(control_pb2.GetStatusResponse, *self._status(), time.time())

    async def WatchStatus(
        self,
        request: control_pb2.WatchStatusRequest,
        context: "ServicerContext[control_pb2.WatchStatusRequest, control_pb2.WatchStatusResponse]",
    ) -> None:
        """State and load, at once and whenever they differ from the last message. Ends with the daemon or its
        engine."""
        interval_s, heartbeat_s = watch_interval_s(request), watch_heartbeat_s(request)
        with ExitStack() as stack:
            stack.enter_context(self._watchers.joined())
            if request.HasField("router"):
                router = RouterRun(request.router.router_id, request.router.address)
                stack.enter_context(self._board.membership.looked_after(router))
            await self._watch(interval_s, heartbeat_s, context)

    async def _watch(
        self,
        interval_s: float,
        heartbeat_s: float,
        context: "ServicerContext[control_pb2.WatchStatusRequest, control_pb2.WatchStatusResponse]",
    ) -> None:
        sent, silent_at_s = None, math.inf
        while True:
            is_last = self._board.is_over
            status = self._status()
            if status != sent or time.monotonic() >= silent_at_s:
                await context.write(to_status(control_pb2.WatchStatusResponse, *status, time.time()))
                sent = status  # changes during the write are not sent again
                silent_at_s = time.monotonic() + heartbeat_s
            elif is_last:
                return
            else:
                try:
                    async with asyncio.timeout(min(interval_s, silent_at_s - time.monotonic())):
                        await self._board.wait_change()
                except TimeoutError:
                    pass

    def _status(self) -> tuple[EngineState, tuple[PushInFlight, ...]]:
        return self._board.state(), self._in_flight()


def add_starting(table: ServiceTable, services: Iterable[ServiceDescriptor], board: StateBoard) -> StatusAnswers:
    """Adds every method of these services. GetStatus and WatchStatus answer, and what does is returned; a watch goes on
    when the daemon serves. The others are UNAVAILABLE."""
    answers = StatusAnswers(board)
    refuse = _refusing(board)
    for service in services:
        handlers = {
            method.name: method_handler(method, getattr(answers, method.name))
            if method.full_name in _ANSWERED
            else method_handler(method, refuse, bytes)  # nobody reads the request
            for method in service.methods
        }
        table.add_registered_method_handlers(service.full_name, handlers)
    return answers


def _refusing(board: StateBoard) -> Callable[[Any, Any], Awaitable[NoReturn]]:
    async def refuse(request: Any, context: Any) -> NoReturn:
        refusal = RULES[board.phase].control or STARTING  # a call that came just before the daemon serves
        raise refusal(board.startup.described(time.time()) if board.startup is not None else "")

    return refuse
