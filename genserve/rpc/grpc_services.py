"""The services of gRPC that each port of genserve has beside its own: health, reflection, and channelz if asked for."""

from collections.abc import Sequence

import grpc.aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from genserve.rpc import channelz, health
from genserve.rpc.health import HealthServicer, Serving
from genserve.rpc.reflection import add_reflection


def add_grpc_services(
    server: grpc.aio.Server, service_names: Sequence[str], serving: Serving, *, with_channelz: bool = False
) -> None:
    """Adds them for a server that has the services of these names."""
    add_HealthServicer_to_server(HealthServicer(serving, service_names), server)
    names = [*service_names, health.SERVICE_NAME]
    if with_channelz:
        channelz.add_channelz(server)
        names.append(channelz.SERVICE_NAME)
    add_reflection(server, names)
