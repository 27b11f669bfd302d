"""What attackers try, as SECURITY.md lists them, where no other test does it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from genserve.client import AsyncClient
from genserve.errors import PeersFailedError, PermissionDeniedError
from genserve.settings.config import ServeConfig
from genserve.v1 import control_pb2
from genserve.v1.control_pb2_grpc import ControlServiceStub
from tests.rpc.served import weights
from tests.support.credentials import Authority, one_each
from tests.support.patience import STEP_S
from tests.support.refusals import refuses
from tests.support.scripted_daemon import serving


@asynccontextmanager
async def listener_between(address: str) -> AsyncIterator[tuple[str, bytearray]]:
    """Somebody on the network between a client and a daemon: an address in front of it, and all bytes that pass."""
    host, _, port = address.rpartition(":")
    seen = bytearray()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            seen.extend(data)
            writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer), return_exceptions=True)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()


@pytest.mark.parametrize("is_encrypted", [True, False])
async def test_eavesdropper_sees_no_token_and_no_weights(tmp_path: Path, is_encrypted: bool) -> None:
    """Without TLS it sees both, which shows that it would."""
    authority, callers = Authority(tmp_path), one_each(tmp_path)
    pair = authority.issue("127.0.0.1")
    files = {"ssl_certfile": pair.cert_file, "ssl_keyfile": pair.key_file} if is_encrypted else {}
    config = ServeConfig(port=0, auth_file=callers.auth_file, no_shared_memory=True, **files)  # type: ignore[arg-type]
    token, pushed = callers.tokens["trainer"], weights(1)
    async with serving(config) as daemon, listener_between(daemon.address) as (address, seen):
        ca_file = authority.ca_file if is_encrypted else None
        async with AsyncClient(address, token=token, ca_file=ca_file) as client:  # type: ignore[arg-type]
            await client.push_weights(pushed, version=1)
            await client.status()
        assert (bytes(pushed["a"].data) in seen) is not is_encrypted
        assert (token.encode() in seen) is not is_encrypted
        assert seen


async def test_a_call_with_too_much_metadata_ends_alone(tmp_path: Path) -> None:
    """Others on the same connection go on."""
    callers = one_each(tmp_path)
    async with serving(ServeConfig(port=0, auth_file=callers.auth_file, max_metadata_bytes=4096)) as daemon:
        control = ControlServiceStub(daemon.channel)
        own = (("authorization", f"Bearer {callers.tokens['generate']}"),)
        for size, code in ((100, None), (100_000, grpc.StatusCode.RESOURCE_EXHAUSTED), (100, None)):
            call = control.GetStatus(
                control_pb2.GetStatusRequest(), metadata=(*own, ("further", "x" * size)), timeout=30
            )
            if code is None:
                await call
            else:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call
                assert raised.value.code() is code


async def test_calls_above_the_limit_of_a_connection_wait_for_those_that_run(tmp_path: Path) -> None:
    """Other connections go on."""
    callers = one_each(tmp_path)
    async with (
        serving(ServeConfig(port=0, auth_file=callers.auth_file, max_streams=2)) as daemon,
        AsyncClient(daemon.address, token=callers.tokens["generate"]) as client,
    ):
        watching = [client.watch_status(interval_s=0.1) for _ in range(2)]
        for each in watching:
            await anext(each)
        third = asyncio.create_task(client.status())
        async with AsyncClient(daemon.address, token=callers.tokens["operator"]) as other:
            for _ in range(10):
                await other.status()
        assert not third.done()
        await watching[0].aclose()
        await asyncio.wait_for(third, STEP_S)
        await watching[1].aclose()


async def test_a_token_is_sent_to_no_peer_that_the_authorities_do_not_know(tmp_path: Path) -> None:
    """Whoever may call LoadWeights names the peers."""
    authority, stranger, callers = Authority(tmp_path), Authority(tmp_path), one_each(tmp_path)
    pair, theirs = authority.issue("127.0.0.1"), stranger.issue("127.0.0.1")
    config = ServeConfig(
        port=0,
        ssl_certfile=pair.cert_file,
        ssl_keyfile=pair.key_file,
        ssl_ca_certs=authority.ca_file,
        ssl_cert_reqs=0,
        auth_file=callers.auth_file,
        peer_token_file=callers.token_file("router"),
    )
    async with (
        serving(ServeConfig(port=0, ssl_certfile=theirs.cert_file, ssl_keyfile=theirs.key_file)) as peer,
        serving(config) as daemon,
        AsyncClient(daemon.address, ca_file=authority.ca_file, token=callers.tokens["trainer"]) as trainer,
        AsyncClient(peer.address, ca_file=stranger.ca_file) as at_peer,
    ):
        await at_peer.push_weights(weights(1), version=1)
        with refuses(PeersFailedError, says="CERTIFICATE_VERIFY_FAILED"):
            await trainer.load_weights(peers=[peer.address], version=1)


async def test_only_a_trainer_can_make_the_daemon_connect_elsewhere(tmp_path: Path) -> None:
    """An operator cannot either."""
    callers = one_each(tmp_path)
    async with serving(ServeConfig(port=0, auth_file=callers.auth_file)) as daemon:
        for name in ("generate", "operator"):
            async with AsyncClient(daemon.address, token=callers.tokens[name]) as client:
                with pytest.raises(PermissionDeniedError):
                    await client.load_weights(peers=["127.0.0.1:1"], version=1)
