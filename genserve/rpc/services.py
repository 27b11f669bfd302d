"""The methods that a server has. They change while it runs: a daemon answers before its engine is there."""

from collections.abc import Mapping, Sequence
from typing import Self, cast

import grpc
import grpc.aio

from genserve.rpc.handlers import Handler


class ServiceTable:
    """Takes handlers as a server does, and finds them as a server does: the handler of a method that was added last is
    used, and generic handlers come after all others."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {}
        """Those that are no generic ones, by method."""
        self._generic: list[grpc.GenericRpcHandler] = []

    @property
    def as_server(self) -> grpc.aio.Server:
        """For functions that add services, which only know servers."""
        return cast(grpc.aio.Server, self)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        """As grpc.aio.Server has it."""
        self.handlers.update({f"/{service_name}/{name}": handler for name, handler in method_handlers.items()})

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """As grpc.aio.Server has it."""
        self._generic.extend(generic_rpc_handlers)

    def service(self, details: grpc.HandlerCallDetails) -> "Handler | None":
        """The handler of a method, if there is one."""
        if (handler := self.handlers.get(details.method)) is not None:
            return handler
        found = (each.service(details) for each in self._generic)
        return next((handler for handler in found if handler is not None), None)


class Services(grpc.GenericRpcHandler):
    """What a server serves now. gRPC takes handlers only before a server starts, so it has this one, and its table may
    be exchanged at any time. Calls that run keep their handlers."""

    def __init__(self, table: ServiceTable) -> None:
        self._table = table

    @classmethod
    def of(cls, server: grpc.aio.Server, table: ServiceTable) -> Self:
        """The services of a server that has not started."""
        services = cls(table)
        server.add_generic_rpc_handlers((services,))
        return services

    def become(self, table: ServiceTable) -> None:
        """From now on calls find their handlers in this table."""
        self._table = table

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "Handler | None":
        """gRPC asks this for each call."""
        return self._table.handlers.get(handler_call_details.method) or self._table.service(handler_call_details)
