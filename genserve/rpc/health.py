"""grpc.health.v1 from the state board: there is no second copy of the state that could be out of date."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from genserve.rpc.watchers import Watchers

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Serving(Protocol):
    """The daemon's state board, or what a front end sees of it."""

    @property
    def is_serving(self) -> bool:
        """Whether health says SERVING."""

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more: watchers send the last state and end."""

    async def wait_change(self) -> None:
        """Returns when something changed after the call."""


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Answers for `service_names` and for the whole server, which is "". All have the same status."""

    def __init__(self, board: Serving, service_names: Iterable[str]) -> None:
        self._board = board
        self._service_names = frozenset(service_names) | {""}
        self._watchers = Watchers("health", "end some that nobody reads, or ask Check from time to time")

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: "ServicerContext[Any, Any]"
    ) -> health_pb2.HealthCheckResponse:
        """The present status; NOT_FOUND for an unknown service, as the protocol requires."""
        if request.service not in self._service_names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: "ServicerContext[Any, Any]") -> None:
        """The status, at once and whenever it changes. Ends with the daemon or its engine."""
        with self._watchers.joined():
            await self._watch(request, context)

    async def _watch(self, request: health_pb2.HealthCheckRequest, context: "ServicerContext[Any, Any]") -> None:
        sent: int | None = None
        while True:
            is_last = self._board.is_over
            status = self._status(request.service)
            if status != sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            elif is_last:
                return
            else:
                await self._board.wait_change()

    def _status(self, service: str) -> int:
        if service not in self._service_names:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if self._board.is_serving:
            return health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse.NOT_SERVING
