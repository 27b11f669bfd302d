"""Addresses, reflection and keepalive of the server itself."""

import asyncio
import json
import os
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from genserve.rpc import listener
from genserve.rpc.listener import bind
from genserve.rpc.server import SERVICE_NAMES
from genserve.settings.config import ServeConfig
from genserve.v1 import control_pb2
from genserve.v1.control_pb2_grpc import ControlServiceStub
from tests.support.http2 import ACK, PING, SETTINGS, connected, frame_bytes, frame_of
from tests.support.patience import STEP_S
from tests.support.scripted_daemon import Daemon, serving


async def reflect(daemon: Daemon, version: str, **request: str) -> reflection_pb2.ServerReflectionResponse:
    """One question to the reflection service of a version."""
    method = daemon.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method(iter([reflection_pb2.ServerReflectionRequest(**request)]), timeout=30)
    response: reflection_pb2.ServerReflectionResponse = await call.read()
    return response


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_tells_all_services_and_their_messages(daemon: Daemon, version: str) -> None:
    """Under the name that new clients ask for and under the one that old ones know."""
    listed = {each.name for each in (await reflect(daemon, version, list_services="")).list_services_response.service}
    assert listed >= {*SERVICE_NAMES, "grpc.health.v1.Health"}
    files = await reflect(daemon, version, file_containing_symbol="genserve.v1.ControlService")
    names = {
        descriptor_pb2.FileDescriptorProto.FromString(each).name
        for each in files.file_descriptor_response.file_descriptor_proto
    }
    assert names >= {"genserve/v1/control.proto", "genserve/v1/types.proto", "google/protobuf/duration.proto"}


async def test_grpcurl_needs_no_proto_files(daemon: Daemon) -> None:
    """What operators type; JSON reads well."""
    program = Path(sys.executable).parent / "grpcurl"
    arguments = ("-plaintext", "-d", '{"holder": "me"}', daemon.address, "genserve.v1.ControlService/Pause")
    process = await asyncio.create_subprocess_exec(
        program, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), STEP_S)
    assert process.returncode == 0, err
    answer = json.loads(out)
    assert answer["lease"]["holder"] == "me"
    assert answer["state"]["phase"] == "PHASE_PAUSED"


async def test_a_taken_port_is_an_error_that_names_it(daemon: Daemon) -> None:
    """Two daemons never share a port in silence."""
    port = int(daemon.address.rsplit(":", 1)[1])
    with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
        bind(grpc.aio.server(options=[("grpc.so_reuseport", 0)]), "127.0.0.1", port, "")
    with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
        async with serving(ServeConfig(port=port)):
            pass


async def test_a_unix_socket_can_be_the_only_address(tmp_path: Path) -> None:
    """Port -1: nothing listens on TCP, and the address for clients is the socket."""
    path = tmp_path / "s"
    async with serving(ServeConfig(port=-1, uds=str(path))) as daemon:
        assert daemon.address == f"unix:{path}"
        assert (await daemon.control.GetStatus(control_pb2.GetStatusRequest())).state.instance_id == "test"


async def test_a_daemon_listens_at_both_addresses(tmp_path: Path) -> None:
    """Clients are told the one that others reach as well."""
    path = tmp_path / "s"
    async with serving(ServeConfig(port=0, uds=str(path))) as daemon:
        assert daemon.address.startswith("127.0.0.1:")
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            near = await ControlServiceStub(channel).GetStatus(control_pb2.GetStatusRequest(), timeout=30)
        far = await daemon.control.GetStatus(control_pb2.GetStatusRequest(), timeout=30)
        assert near.state.instance_id == far.state.instance_id == "test"


class Deaf:
    """A server of gRPC's that says in its other way that it cannot listen."""

    def add_insecure_port(self, address: str) -> int:
        return 0


@pytest.mark.parametrize(("host", "uds", "named"), [("h", "", "h:7"), ("h", "s", "unix:s")])
def test_an_address_that_grpc_refuses_without_an_error_is_one(host: str, uds: str, named: str) -> None:
    """It returns port 0: nobody would ever connect."""
    with pytest.raises(OSError, match=f"cannot listen on {named}"):
        bind(Deaf(), host, 7, uds)  # type: ignore[arg-type]


async def test_a_file_that_is_no_socket_is_not_connected_to(tmp_path: Path) -> None:
    """It is in nobody's use as an address."""
    (tmp_path / "s").write_text("kept")
    with pytest.raises(OSError, match="something that is no socket is there"):
        async with serving(ServeConfig(port=-1, uds=str(tmp_path / "s"))):
            pass
    assert (tmp_path / "s").read_text() == "kept"


async def test_a_unix_socket_in_use_is_not_taken_away(tmp_path: Path) -> None:
    """gRPC would unlink it, and the daemon behind it would never be reached again; one left by a crash is replaced."""
    path = tmp_path / "s"
    async with serving(ServeConfig(port=-1, uds=str(path))) as daemon:
        with pytest.raises(OSError, match=str(path)):
            async with serving(ServeConfig(port=0, uds=str(path))):
                pass
        assert (await daemon.control.GetStatus(control_pb2.GetStatusRequest())).state.instance_id == "test"
    left_by_a_crash = socket.socket(socket.AF_UNIX)
    path.unlink(missing_ok=True)
    left_by_a_crash.bind(str(path))
    left_by_a_crash.close()
    assert path.is_socket()
    async with serving(ServeConfig(port=-1, uds=str(path))) as daemon:
        await daemon.control.GetStatus(control_pb2.GetStatusRequest())


async def test_ipv6_addresses_are_written_with_brackets() -> None:
    """As clients need them."""
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with serving(ServeConfig(host="::1", port=0)) as daemon:
        assert daemon.address.startswith("[::1]:")
        await daemon.control.GetStatus(control_pb2.GetStatusRequest())


async def test_a_method_that_does_not_exist_is_unimplemented(daemon: Daemon) -> None:
    """The interceptor lets gRPC say so."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await daemon.channel.unary_unary("/genserve.v1.ControlService/Nope")(b"", timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_peer_that_says_nothing_is_asked_whether_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has no call: its connection would stay half open for hours. Here it is asked sooner."""
    options = [(key, 300 if key == "grpc.keepalive_time_ms" else value) for key, value in listener.SERVER_OPTIONS]
    monkeypatch.setattr(listener, "SERVER_OPTIONS", tuple(options))
    async with serving(ServeConfig(port=0)) as daemon, connected(daemon.address) as (reader, writer):
        writer.write(frame_bytes(SETTINGS, ACK))
        while (await frame_of(reader))[:2] != (PING, 0):
            pass


async def test_a_host_that_is_gone_is_given_up_after_ten_seconds(daemon: Daemon) -> None:
    """The kernel does: what it has sent was not acknowledged. A process that stands still, whose kernel acknowledges,
    is given up by gRPC, a minute later."""
    timeouts_ms: list[int] = []
    async with connected(daemon.address) as (_, writer):
        _, own_port = writer.get_extra_info("sockname")
        while not timeouts_ms:
            await asyncio.sleep(0.01)
            timeouts_ms = user_timeouts_ms(own_port)
    assert timeouts_ms == [10_000]


def user_timeouts_ms(port: int) -> list[int]:
    """TCP_USER_TIMEOUT of the connections to that port in this process, in which the server runs."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed, or one that listens
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{entry}").st_mode):
                with socket.socket(fileno=os.dup(int(entry))) as connection:
                    if connection.getpeername()[1:2] == (port,):
                        found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    return found
