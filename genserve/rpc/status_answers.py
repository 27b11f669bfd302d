"""GetStatus and WatchStatus, which a daemon answers from its first moment to its last."""

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

from genserve.control.state import StateBoard
from genserve.rpc.convert.control import to_load, watch_heartbeat_s, watch_interval_s
from genserve.rpc.convert.values import to_state
from genserve.rpc.watchers import Watchers
from genserve.v1 import control_pb2

if TYPE_CHECKING:
    from grpc.aio import ServicerContext


class StatusAnswers:
    """The two methods of ControlService that need no engine."""

    def __init__(self, board: StateBoard) -> None:
        self._board = board
        self._watchers = Watchers("the status")

    async def GetStatus(
        self, request: control_pb2.GetStatusRequest, context: "ServicerContext[Any, Any]"
    ) -> control_pb2.GetStatusResponse:
        """State and load."""
        return control_pb2.GetStatusResponse(state=to_state(self._board.state()), load=to_load(self._board.load()))

    async def WatchStatus(
        self,
        request: control_pb2.WatchStatusRequest,
        context: "ServicerContext[control_pb2.WatchStatusRequest, control_pb2.WatchStatusResponse]",
    ) -> None:
        """State and load, at once and whenever they differ from the last message. Ends with the daemon or its
        engine."""
        interval_s, heartbeat_s = watch_interval_s(request), watch_heartbeat_s(request)
        with self._watchers.joined():
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
            status = (self._board.state(), self._board.load())
            if status != sent or time.monotonic() >= silent_at_s:
                await context.write(control_pb2.WatchStatusResponse(state=to_state(status[0]), load=to_load(status[1])))
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
