"""Calls of routers, which say in their metadata which run of a router they come from."""

from typing import Final

import grpc
import grpc.aio

from genserve.control.membership import Membership
from genserve.errors import FleetHeldError
from genserve.rpc.handlers import Context, Continuation, Handler, refusing
from genserve.wire.literals import ROUTER_ID_KEY

_BEFORE_WATCHING: Final = frozenset(
    {"/genserve.v1.ControlService/WatchStatus", "/genserve.v1.ControlService/GetServerInfo"}
)


class RouterCalls(grpc.aio.ServerInterceptor):
    """Refuses calls of routers that do not look after this daemon any more. Callers that are no routers pass."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """The handler of a method, or one that refuses."""
        router_id = dict(handler_call_details.invocation_metadata or ()).get(ROUTER_ID_KEY)
        if router_id and handler_call_details.method not in _BEFORE_WATCHING:
            try:
                self._membership.check(str(router_id))
            except FleetHeldError as error:
                return refusing(error)
        return await continuation(handler_call_details)


def router_id_of(context: Context) -> str:
    """The run of a router that a call comes from; "" = no router."""
    return str(dict(context.invocation_metadata() or ()).get(ROUTER_ID_KEY, ""))
