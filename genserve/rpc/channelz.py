"""gRPC's own view of a process: its servers, connections and channels, with their counters and their peers."""

import grpc.aio
from grpc_channelz.v1 import channelz, channelz_pb2

SERVICE_NAME: str = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name


def add_channelz(server: grpc.aio.Server) -> None:
    """Registers grpc.channelz.v1. It shows every caller the addresses of all others."""
    channelz.add_channelz_servicer(server)
