"""gRPC's own view of a daemon, for who asks for it."""

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

from genserve.settings.config import ServeConfig
from genserve.v1 import control_pb2
from tests.support.scripted_daemon import serving


@pytest.mark.parametrize("shown", [True, False])
async def test_connections_are_shown_only_with_the_flag(shown: bool) -> None:
    """They name the peers of everybody."""
    async with serving(ServeConfig(port=0, channelz=shown)) as daemon:
        await daemon.control.GetStatus(control_pb2.GetStatusRequest())
        stub = channelz_pb2_grpc.ChannelzStub(daemon.channel)
        if not shown:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            return
        answer = await stub.GetServers(channelz_pb2.GetServersRequest(), timeout=30)
        port = daemon.address.rpartition(":")[2]
        counted = 0
        for server in answer.server:
            request = channelz_pb2.GetServerSocketsRequest(server_id=server.ref.server_id)
            for each in (await stub.GetServerSockets(request, timeout=30)).socket_ref:
                socket = await stub.GetSocket(channelz_pb2.GetSocketRequest(socket_id=each.socket_id), timeout=30)
                if str(socket.socket.local.tcpip_address.port) == port:
                    counted += socket.socket.data.streams_started
        assert counted >= 2
