"""A router and its replicas with TLS, certificates of both ends, and roles."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from genserve.client import AsyncClient
from genserve.errors import PermissionDeniedError, UnauthenticatedError
from genserve.fleet.config import RouteConfig
from genserve.fleet.serve import RunningRouter, start_router
from genserve.process.signals import Stopped
from genserve.routing.replica import ReplicaState
from genserve.security import files
from genserve.settings.config import ServeConfig
from tests.fleet.routers import MAX_STAGING_BYTES, QUICK
from tests.fleet.talking_engine import let_talk
from tests.support.breakable_link import BreakableLink
from tests.support.credentials import Authority, Callers, Pair, one_each
from tests.support.patience import STEP_S, until
from tests.support.pulled_peers import CHECKPOINT, weights
from tests.support.scripted_daemon import Daemon, serving


@dataclass
class Secured:
    """Everybody has the certificate in `pair`, and the list of `callers`. The router reaches replicas over `links`."""

    authority: Authority
    pair: Pair
    callers: Callers
    daemons: list[Daemon]
    links: list[BreakableLink]
    running: RunningRouter

    def client(self, name: str, **settings: Any) -> AsyncClient:
        return AsyncClient(
            self.running.address,
            ca_file=self.authority.ca_file,
            cert_file=self.pair.cert_file,
            key_file=self.pair.key_file,
            token=self.callers.tokens[name],
            **settings,
        )

    def states(self) -> list[tuple[ReplicaState, str]]:
        fleet = self.running.router.fleet
        return [fleet.where(upstream.member) for upstream in fleet.upstreams.values()]

    async def until_ready(self) -> None:
        await until(lambda: len(self.running.router.fleet.ready) == len(self.daemons))


@asynccontextmanager
async def secured(directory: Path, router_token: str = "router", num_replicas: int = 2) -> AsyncIterator[Secured]:
    authority, callers = Authority(directory), one_each(directory)
    pair = authority.issue("127.0.0.1", "fleet.example")
    access: dict[str, Any] = {
        "port": 0,
        "ssl_certfile": pair.cert_file,
        "ssl_keyfile": pair.key_file,
        "ssl_ca_certs": authority.ca_file,
        "auth_file": callers.auth_file,
        "peer_name": "fleet.example",
    }
    daemon = ServeConfig(peer_token_file=callers.token_file("trainer"), **access)
    held: dict[str, Any] = {"checkpoint": CHECKPOINT, "max_staging_bytes": MAX_STAGING_BYTES}
    async with AsyncExitStack() as stack:
        daemons = [
            await stack.enter_async_context(serving(daemon, instance_id=uuid4().hex, **held))
            for _ in range(num_replicas)
        ]
        links = [await stack.enter_async_context(BreakableLink(each.address)) for each in daemons]
        route = RouteConfig(
            [each.address for each in links],
            fleet=QUICK,
            peer_token_file=callers.token_file(router_token) if router_token else "",
            **access,
        )
        running = await start_router(route, stack, Stopped())
        yield Secured(authority, pair, callers, daemons, links, running)


async def test_each_role_does_its_own_through_the_router(tmp_path: Path) -> None:
    """The router may do everything at the replicas. Its callers may not."""
    async with secured(tmp_path) as fleet:
        await fleet.until_ready()
        async with fleet.client("generate") as worker, fleet.client("trainer") as trainer:
            assert await worker.tokenize("a") == [0, 97]
            for refused in (
                worker.push_weights(weights(1), version=1),
                worker.pause(ttl_s=60.0),
                worker.get_weights(include_digests=True),
                worker.sleep(),
                worker.add_replica("127.0.0.1:1"),
                trainer.remove_replica(fleet.links[0].address),
            ):
                with pytest.raises(PermissionDeniedError):
                    await refused
            result = await trainer.push_weights(weights(1), version=1)
            assert result.applied is not None
            assert [each.engine.weight_version for each in fleet.daemons] == [1, 1]
        async with fleet.client("operator") as operator:
            assert len((await operator.list_replicas()).replicas) == 2
            with pytest.raises(PermissionDeniedError):
                await operator.tokenize("a")


async def test_a_direct_client_calls_replicas_with_its_own_role(tmp_path: Path) -> None:
    async with secured(tmp_path) as fleet:
        await fleet.until_ready()
        async with fleet.client("generate", direct=True, server_name="fleet.example") as worker:
            generating = asyncio.create_task(worker.generate([1, 2], max_tokens=1))
            await until(lambda: any(daemon.engine.streams for daemon in fleet.daemons))
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)


async def test_a_router_without_a_role_at_the_replicas_says_so(tmp_path: Path) -> None:
    """Its replicas do not get requests, and the reason is what they have answered: who generates may see the state, and
    looks after nobody."""
    async with secured(tmp_path, router_token="generate") as fleet:
        members = fleet.running.router.fleet
        await until(lambda: all("needs the role operator" in each.failure for each in members.members))


async def test_a_router_without_a_token_says_with_which_flag_it_gets_one(tmp_path: Path) -> None:
    """A replica would say what its own callers do about it."""
    async with secured(tmp_path, router_token="") as fleet:
        await until(lambda: all("--peer-token-file" in why for _, why in fleet.states()))


async def test_a_router_with_an_unknown_token_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    async with secured(tmp_path) as fleet:
        await fleet.until_ready()
        one_each(tmp_path)  # everybody has another token, and the router's file, too
        (tmp_path / "router.token").write_text("a-token-that-nobody-lists\n")
        fleet.links[0].cut()
        await until(lambda: any("token is unknown" in why for _, why in fleet.states()))
        async with fleet.client("trainer") as trainer:
            with pytest.raises(UnauthenticatedError):
                await trainer.status()


async def test_a_replica_is_connected_to_again_with_new_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a new authority: the channels of before could not connect. By the router, and by a client that calls
    replicas itself."""
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)
    async with (
        secured(tmp_path, num_replicas=1) as fleet,
        fleet.client("generate", direct=True, server_name="fleet.example") as worker,
    ):
        let_talk(fleet.daemons[0].engine, 0)
        await fleet.until_ready()
        await worker.generate([1], max_tokens=1, text=False)
        Authority(tmp_path).replaces(fleet.authority, fleet.pair, "127.0.0.1", "fleet.example")
        fleet.links[0].cut()
        await until(lambda: not fleet.running.router.fleet.ready)
        await fleet.until_ready()
        await worker.generate([1], max_tokens=1, text=False, timeout_s=STEP_S)


@pytest.mark.parametrize("asks", [True, False])
async def test_a_start_says_that_clients_need_certificates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, asks: bool
) -> None:
    """--ssl-ca-certs alone asks for them, which nobody would guess from its name."""
    authority = Authority(tmp_path)
    pair = authority.issue("127.0.0.1")
    config = RouteConfig(
        port=0,
        ssl_certfile=pair.cert_file,
        ssl_keyfile=pair.key_file,
        ssl_ca_certs=authority.ca_file,
        ssl_cert_reqs=-1 if asks else 0,
    )
    async with AsyncExitStack() as stack:
        await start_router(config, stack, Stopped())
    said = f"genserve: clients must present a certificate of {authority.ca_file} "
    assert (said in capsys.readouterr().err) is asks
