"""Encrypted connections, certificates of both ends, and how they are exchanged for new ones."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from genserve.client import AsyncClient
from genserve.errors import PeersFailedError, PermissionDeniedError, UnauthenticatedError, UnavailableError
from genserve.ingest.processes import IngestProcesses
from genserve.ingest.relay import IngestSettings
from genserve.rpc.listener import server_options
from genserve.security import files
from genserve.settings.config import ServeConfig
from tests.rpc.served import weights
from tests.support import pulled_peers as peers
from tests.support.credentials import Authority, Pair, list_callers, one_each
from tests.support.patience import STEP_S
from tests.support.refusals import refuses
from tests.support.scripted_daemon import serving


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def tls(pair: Pair, **settings: Any) -> ServeConfig:
    """The settings of a daemon with this certificate."""
    return ServeConfig(port=0, ssl_certfile=pair.cert_file, ssl_keyfile=pair.key_file, **settings)


def own(pair: Pair) -> dict[str, str]:
    """The settings of a client with this certificate."""
    return {"cert_file": pair.cert_file, "key_file": pair.key_file}


async def test_a_client_that_knows_the_authority_is_served(authority: Authority) -> None:
    async with (
        serving(tls(authority.issue("127.0.0.1"))) as daemon,
        AsyncClient(daemon.address, ca_file=authority.ca_file) as client,
    ):
        assert (await client.push_weights(weights(1), version=1)).applied.active_version == 1


async def test_a_client_that_does_not_is_not(authority: Authority, tmp_path: Path) -> None:
    """Nor does one that speaks no TLS, or that looks for another name, send anything."""
    other = Authority(tmp_path)
    async with serving(tls(authority.issue("daemon.example"))) as daemon:
        for settings, says in (
            ({"ca_file": other.ca_file}, "no authority known here (ca_file)"),
            ({}, "it may need TLS (tls or ca_file)"),
            ({"tls": True}, "no authority known here (ca_file)"),
            ({"ca_file": authority.ca_file}, "its certificate is for another name (server_name)"),
        ):
            async with AsyncClient(daemon.address, **settings) as client:  # type: ignore[arg-type]
                with refuses(UnavailableError, says=says) as refused:
                    await client.status(timeout_s=30.0)
                assert refused.value.message.startswith(f"no daemon answers at {daemon.address}: ")
        async with AsyncClient(daemon.address, ca_file=authority.ca_file, server_name="daemon.example") as client:
            await client.status()


async def test_a_direct_client_is_told_which_setting_mends_it(authority: Authority) -> None:
    """Its tokens wait for what the router says of its replicas."""
    async with (
        serving(tls(authority.issue("127.0.0.1"))) as daemon,
        AsyncClient(daemon.address, direct=True) as client,
    ):
        with refuses(UnavailableError, says="it may need TLS (tls or ca_file)"):
            await client.generate([1], max_tokens=1)


async def test_a_certificate_that_has_expired_is_told_as_such(authority: Authority) -> None:
    """No setting of the client mends it."""
    expired = datetime.now(UTC) - timedelta(minutes=5)
    async with (
        serving(tls(authority.issue("127.0.0.1", expires=expired))) as daemon,
        AsyncClient(daemon.address, ca_file=authority.ca_file) as client,
    ):
        with refuses(UnavailableError, says=f"{daemon.address}: its certificate has expired") as refused:
            await client.status(timeout_s=30.0)
        assert refused.value.metadata == {}


async def test_with_authorities_a_client_needs_a_certificate_of_theirs(authority: Authority, tmp_path: Path) -> None:
    stranger, expired = Authority(tmp_path), datetime.now(UTC) - timedelta(minutes=5)
    async with serving(tls(authority.issue("127.0.0.1"), ssl_ca_certs=authority.ca_file)) as daemon:
        for settings, says in (
            ({}, "it may require a certificate of its clients (cert_file)"),
            (own(stranger.issue("worker")), "it may not accept this client's certificate"),
            (own(authority.issue("worker", expires=expired)), "it may not accept this client's certificate"),
        ):
            async with AsyncClient(daemon.address, ca_file=authority.ca_file, **settings) as client:  # type: ignore[arg-type]
                with refuses(UnavailableError, says=says):
                    await client.status(timeout_s=30.0)
        async with AsyncClient(daemon.address, ca_file=authority.ca_file, **own(authority.issue("worker"))) as client:
            await client.push_weights(weights(1), version=1)


async def test_a_certificate_has_the_role_of_its_name(authority: Authority, tmp_path: Path) -> None:
    callers = list_callers(tmp_path, {"*.workers.example": ["generate"]}, trainer=["trainer"])
    config = tls(authority.issue("127.0.0.1"), ssl_ca_certs=authority.ca_file, auth_file=callers.auth_file)
    async with serving(config) as daemon:
        worker = own(authority.issue("one.workers.example"))
        async with AsyncClient(daemon.address, ca_file=authority.ca_file, **worker) as client:  # type: ignore[arg-type]
            await client.status()
            assert await client.tokenize("a") == [0, 97]
            for _ in range(5):
                with pytest.raises(PermissionDeniedError):
                    await client.push_weights(weights(1), version=1)
            assert (await client.get_weights()).weight_version == 0
            with pytest.raises(PermissionDeniedError):
                await client.get_weights(include_digests=True)
        unlisted = own(authority.issue("one.example"))
        async with AsyncClient(daemon.address, ca_file=authority.ca_file, **unlisted) as client:  # type: ignore[arg-type]
            with refuses(UnauthenticatedError, says="certificate"):
                await client.status()
        token = callers.tokens["trainer"]
        async with AsyncClient(daemon.address, ca_file=authority.ca_file, token=token, **worker) as client:  # type: ignore[arg-type]
            assert (await client.push_weights(weights(1), version=1)).applied.active_version == 1


async def test_new_connections_get_a_new_certificate(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are there go on. A key that is not the certificate's changes nothing."""
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    pair, successor = authority.issue("127.0.0.1"), Authority(tmp_path)
    async with serving(tls(pair)) as daemon, AsyncClient(daemon.address, ca_file=authority.ca_file) as first:
        await first.status()
        authority.issue("127.0.0.1", into=Pair(pair.cert_file, str(tmp_path / "elsewhere.key")))  # half of a pair
        async with AsyncClient(daemon.address, ca_file=authority.ca_file) as client:
            await client.status()
        successor.issue("127.0.0.1", into=pair)
        async with AsyncClient(daemon.address, ca_file=successor.ca_file) as client:
            await client.status()
        async with AsyncClient(daemon.address, ca_file=authority.ca_file) as client:
            with pytest.raises(UnavailableError):
                await client.status(timeout_s=30.0)
        await first.status()


async def test_a_client_connects_with_its_certificate_of_now(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its running calls go on over the connection that they have."""
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    callers = list_callers(tmp_path, {"before": ["generate"], "after": ["operator"]})
    config = tls(authority.issue("127.0.0.1"), ssl_ca_certs=authority.ca_file, auth_file=callers.auth_file)
    pair = authority.issue("before")
    async with (
        serving(config) as daemon,
        AsyncClient(daemon.address, ca_file=authority.ca_file, **own(pair)) as client,  # type: ignore[arg-type]
    ):
        watching = client.watch_status(interval_s=0.1)
        await anext(watching)
        with pytest.raises(PermissionDeniedError):
            await client.pause(ttl_s=60.0)
        authority.issue("after", into=pair)
        await client.resume((await client.pause(ttl_s=60.0)).lease.lease_id)
        await anext(watching)
        await watching.aclose()


async def test_a_token_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    callers = one_each(tmp_path)
    path = callers.token_file("generate")
    async with (
        serving(ServeConfig(port=0, auth_file=callers.auth_file)) as daemon,
        AsyncClient(daemon.address, token_file=path) as client,
    ):
        with pytest.raises(PermissionDeniedError):
            await client.pause(ttl_s=60.0)
        Path(path).write_text(callers.tokens["operator"])  # noqa: ASYNC240  # a moment
        await client.resume((await client.pause(ttl_s=60.0)).lease.lease_id)


async def test_a_unix_socket_is_for_its_user_alone_and_needs_a_token(authority: Authority, tmp_path: Path) -> None:
    callers, path = one_each(tmp_path), tmp_path / "socket"
    config = tls(authority.issue("127.0.0.1"), uds=str(path), auth_file=callers.auth_file)
    before = os.umask(0)
    try:
        async with serving(config):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            async with AsyncClient(f"unix:{path}", token=callers.tokens["generate"]) as client:
                await client.status()
            async with AsyncClient(f"unix:{path}") as client:
                with pytest.raises(UnauthenticatedError):
                    await client.status()
    finally:
        os.umask(before)


@asynccontextmanager
async def with_ingest(config: ServeConfig) -> AsyncIterator[int]:
    """A daemon with a receiving process. Gives the port of this."""
    asks = bool(config.auth_file)
    settings = IngestSettings("127.0.0.1", 0, "", server_options(config), config.certificate, asks=asks)
    processes = IngestProcesses(1, settings)
    try:
        await processes.start()
        async with serving(config, processes):
            yield processes.ports[0]
    finally:
        await processes.stop()


@pytest.mark.slow
async def test_receiving_processes_check_the_caller_of_a_push(authority: Authority, tmp_path: Path) -> None:
    """They have the certificate, too, and pass on whose certificate the client has. Nobody else can say it."""
    callers = list_callers(tmp_path, {"trainer.example": ["trainer"], "worker.example": ["generate"]}, t=["trainer"])
    config = tls(authority.issue("127.0.0.1"), ssl_ca_certs=authority.ca_file, auth_file=callers.auth_file)
    async with with_ingest(config) as port:
        trainer, worker = own(authority.issue("trainer.example")), own(authority.issue("worker.example"))
        forged = {"genserve-caller-san-bin": b"trainer.example"}
        for settings in ({}, {"metadata": forged}):
            target = f"127.0.0.1:{port}"
            async with AsyncClient(target, ca_file=authority.ca_file, **worker, **settings) as client:  # type: ignore[arg-type]
                for _ in range(5):
                    with pytest.raises(PermissionDeniedError):
                        await client.push_weights(weights(1), version=1)
        async with AsyncClient(target, ca_file=authority.ca_file, **trainer) as client:  # type: ignore[arg-type]
            assert (await client.push_weights(weights(1), version=1)).applied.active_version == 1
        async with AsyncClient(target, ca_file=authority.ca_file, token=callers.tokens["t"], **worker) as client:  # type: ignore[arg-type]
            assert (await client.push_weights(weights(2), version=2)).applied.active_version == 2


async def test_a_daemon_fetches_from_a_peer_with_its_certificate_and_token(
    authority: Authority, tmp_path: Path
) -> None:
    callers = one_each(tmp_path)
    pair = authority.issue("127.0.0.1")
    settings: dict[str, Any] = {"ssl_ca_certs": authority.ca_file, "auth_file": callers.auth_file}
    secured = tls(pair, peer_token_file=callers.token_file("trainer"), no_shared_memory=True, **settings)
    lacking = tls(pair, peer_token_file=callers.token_file("generate"), no_shared_memory=True, **settings)
    held: dict[str, Any] = {"checkpoint": peers.CHECKPOINT, "max_staging_bytes": 100 * peers.MIB}
    mine: dict[str, Any] = {"ca_file": authority.ca_file, "token": callers.tokens["trainer"], **own(pair)}
    async with (
        serving(secured, **held) as parent,
        serving(secured, **held) as child,
        serving(lacking, **held) as orphan,
        AsyncClient(parent.address, **mine) as at_parent,
        AsyncClient(child.address, **mine) as at_child,
        AsyncClient(orphan.address, **mine) as at_orphan,
    ):
        await at_parent.push_weights(peers.weights(1), version=1)
        await at_child.load_weights(peers=[parent.address], version=1)
        assert child.engine.weight_version == 1
        with refuses(PeersFailedError, says="PERMISSION_DENIED"):
            await at_orphan.load_weights(peers=[parent.address], version=1)


async def test_more_connections_than_the_limit_are_refused_and_later_ones_served(authority: Authority) -> None:
    async with serving(tls(authority.issue("127.0.0.1"), max_connections=2)) as daemon:
        clients = [AsyncClient(daemon.address, ca_file=authority.ca_file) for _ in range(3)]
        await clients[0].status()
        await clients[1].status()
        with pytest.raises(UnavailableError):
            await clients[2].status(timeout_s=30.0)
        await clients[0].close()
        async with asyncio.timeout(STEP_S):
            while True:
                try:
                    await clients[2].status(timeout_s=30.0)
                    break
                except UnavailableError:
                    await asyncio.sleep(0.1)
        await clients[1].close()
        await clients[2].close()
