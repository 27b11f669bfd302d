"""A client that calls replicas itself, when its router is lost, and when it does not reach what the router reaches."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from genserve.client import AsyncClient
from genserve.client.direct.replica import KnownReplica
from genserve.engine.generation import FinishReason
from genserve.errors import GenserveError, ReplicaLostError, UnavailableError
from genserve.fleet.config import RouteConfig
from genserve.fleet.serve import start_router
from genserve.forward.attempts import MAX_LOST
from genserve.process.signals import Stopped
from genserve.routing.replica import ReplicaState, Request
from tests.fleet.direct_fleet import DIRECT, QUIET, DirectClient, DirectFleet, direct_fleet
from tests.fleet.reports import silence_passes, time_passes
from tests.fleet.routers import QUICK, linked, over, replica
from tests.fleet.scripted_fleet import tokens
from tests.fleet.talking_engine import continued, let_talk
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, until
from tests.support.ports import free_port
from tests.support.refusals import refuses

READY = ReplicaState.READY


async def test_tokens_do_not_need_the_router() -> None:
    """It dies while answers come: they go on, and new requests go to the replicas that it told of last. When it is back
    it is heard again."""
    async with direct_fleet() as fleet:
        stream = fleet.client.stream([1], request_id="a")
        reading = asyncio.create_task(anext(stream))
        _, engine = await fleet.running("a")
        fleet.router_link.kill()
        engine.put(tokens([5], prompt=1))
        assert (await reading).outputs[0].token_ids == [5]
        for daemon in fleet.daemons:
            let_talk(daemon.engine, 0)
        with advanced_clock() as clock:
            await time_passes(clock, fleet.routed.running.router.fleet, 2 * DIRECT.silence_s)
            await fleet.client.generate([1], max_tokens=1, text=False)
            with pytest.raises(UnavailableError):
                await fleet.client.list_replicas()
            engine.put(tokens([6], 1, finish=FinishReason.EOS))
            assert (await anext(stream)).outputs[0].token_ids == [6]
            await fleet.router_link.listen_again()
            await fleet.routed.running.router.remove(fleet.links[0].address)
            await until(lambda: fleet.state(0) is None)


async def test_a_router_that_starts_again_is_heard_again() -> None:
    """At the same address, with nothing on its disk: requests wait for it to find out what the replicas serve, and a
    request that runs does not notice."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(replica()) for _ in range(2)]
        config = RouteConfig([each.address for each in daemons], port=free_port(), fleet=QUICK)
        first = await stack.enter_async_context(AsyncExitStack())
        router = await start_router(config, first, Stopped())
        await until(lambda: len(router.router.fleet.ready) == 2)
        client = await stack.enter_async_context(DirectClient(router.address, direct=DIRECT))
        generating = asyncio.create_task(client.generate([1], request_id="a"))
        await until(lambda: any(daemon.engine.streams for daemon in daemons))
        await first.aclose()
        again = await start_router(config, stack, Stopped())
        await until(lambda: len(again.router.fleet.ready) == 2)
        await until(lambda: [each.state for each in client.replicas.replicas()] == [READY, READY])
        (engine,) = [stream for daemon in daemons for stream in daemon.engine.streams]
        for daemon in daemons:
            let_talk(daemon.engine, 0)
        await client.generate([1], max_tokens=1, text=False)
        engine.put(tokens([5], prompt=1, finish=FinishReason.EOS))
        assert (await generating).token_ids == [5]


async def test_a_silent_router_is_called_again_and_believed_for_a_while() -> None:
    """Its host has vanished, and closed no connection. After `keep_s` nobody knows what the fleet serves."""
    async with direct_fleet(2) as fleet:
        with advanced_clock() as clock:
            members = fleet.routed.running.router.fleet
            for daemon in fleet.daemons:
                let_talk(daemon.engine, 0)
            await fleet.client.generate([1], max_tokens=1, text=False)
            fleet.router_link.silence()
            await time_passes(clock, members, DIRECT.silence_s)
            assert fleet.known.is_known
            await fleet.client.generate([1], max_tokens=1, text=False)
            await time_passes(clock, members, DIRECT.keep_s)
            assert not fleet.known.is_known
            assert fleet.known.choose(Request()) is None, "not for a request that was begun before, either"
            assert "has told nothing for 300 s" in fleet.known.why_none()
            generating = asyncio.create_task(fleet.client.generate([1], max_tokens=1, text=False, timeout_s=3600))
            await time_passes(clock, members, DIRECT.silence_s)
            with refuses(UnavailableError, says=fleet.router_link.address):
                await generating
            fleet.router_link.let_go()
            await until(lambda: fleet.known.is_known)
            await fleet.client.generate([1], max_tokens=1, text=False, timeout_s=20)


async def test_an_address_of_the_router_alone_is_named() -> None:
    """127.0.0.1 is another host here than there. The error says so at once."""
    async with replica() as daemon, over([daemon], host="0.0.0.0", allow_insecure=True) as fleet:
        await fleet.until_ready()
        port = fleet.running.address.rpartition(":")[2]
        async with AsyncClient(f"0.0.0.0:{port}", direct=True) as client:
            with pytest.raises(UnavailableError) as raised:
                await client.generate([1])
            assert f"{daemon.address}: " in raised.value.message
            many = await client.generate_many([[1], [2]], raise_errors=False, timeout_s=20)
            assert [type(each.error) for each in many] == [UnavailableError, UnavailableError]
            assert (await client.status()).state.phase == "running", "the router is reached"
        assert daemon.engine.requests == []


async def test_a_replica_that_only_the_router_reaches_is_named() -> None:
    """A firewall between the client and all replicas: an error, and not a wait."""
    async with direct_fleet(1, replace(DIRECT, connect_timeout_s=0.5)) as fleet:
        fleet.blind_router()
        fleet.links[0].silence()
        with refuses(UnavailableError, says=fleet.links[0].address):
            await fleet.client.generate([1], timeout_s=20)
        fleet.links[0].let_go()
        let_talk(fleet.daemons[0].engine, 0)
        await fleet.until_known(READY)
        await fleet.client.generate([1], max_tokens=1, text=False, timeout_s=20)


async def test_another_daemon_at_the_address_of_a_replica_gets_nothing() -> None:
    """An address may mean another host in the client's network. The daemons have ids."""
    async with direct_fleet(1) as fleet, replica() as stranger:
        fleet.blind_router()
        fleet.links[0].target = stranger.address
        fleet.links[0].cut()
        with refuses(UnavailableError, says=f"{fleet.links[0].address}: another daemon"):
            await fleet.client.generate([1], timeout_s=20)
        assert stranger.engine.requests == []


async def test_a_replica_that_vanishes_is_lost_when_the_router_says_so() -> None:
    """Its connection tells nothing for many minutes. Where tokens were delivered that is an error."""
    async with direct_fleet(2) as fleet:
        stream = fleet.client.stream([1], request_id="a", timeout_s=3600)
        reading = asyncio.create_task(anext(stream))
        number, engine = await fleet.running("a")
        engine.put(tokens([5], prompt=1))
        await reading
        members = fleet.routed.running.router.fleet
        with advanced_clock() as clock:
            fleet.links[number].silence()
            await silence_passes(clock, members, fleet.links[number].address)
            await until(lambda: fleet.state(number) is ReplicaState.UNHEALTHY)
            await time_passes(clock, members, DIRECT.silence_s, [fleet.links[number].address])
            with pytest.raises(ReplicaLostError) as raised:
                await anext(stream)
        assert raised.value.metadata["num_tokens"] == "1"


async def test_clients_of_a_link_that_breaks_come_back() -> None:
    """One connection of the client broke, not the replica: it is used again as soon as it answers."""
    async with linked(1) as fleet:
        let_talk(fleet.daemons[0].engine, 0)
        async with AsyncClient(fleet.running.address, direct=DIRECT) as client:
            for _ in range(3):
                await client.generate([1], max_tokens=1, text=False, timeout_s=20)
                fleet.links[0].cut()
            await client.generate([1], max_tokens=1, text=False, timeout_s=20)


@pytest.mark.parametrize("many", [False, True], ids=["Generate", "GenerateMany"])
async def test_a_moment_without_network_is_no_death_of_replicas(*, many: bool) -> None:
    """Requests wait for them, and go on: none of the replicas has died with a request."""
    async with direct_fleet(MAX_LOST, replace(QUIET, policies="session,requests")) as fleet:
        engines = [let_talk(daemon.engine, 0) for daemon in fleet.daemons]
        await fleet.client.wait_ready(STEP_S)
        await fleet.until_known(*[READY] * MAX_LOST)
        fleet.blind_router()
        prompts = [[number, 7] for number in range(1, 7 if many else 2)]
        # All at one replica: the others are tried, and lost, when it is.
        options: Any = {"max_tokens": 200, "text": False, "resume": True, "session_id": "one"}
        asking = fleet.client.generate_many(prompts, **options) if many else fleet.client.generate([1, 7], **options)
        generating = asyncio.create_task(asking)
        await until(lambda: sum(each.num_tokens for each in engines) > 20)
        for link in fleet.links:
            link.kill()
        await fleet.until_known(*[ReplicaState.UNHEALTHY] * MAX_LOST)
        for link in fleet.links:
            await link.listen_again()
        answers = await generating if many else [await generating]
        assert [each.token_ids for each in answers] == [continued(prompt, 200) for prompt in prompts]


async def lose_those_that_have_it(fleet: DirectFleet) -> None:
    """A replica dies as soon as it is given a request, until the client gives it to nobody else."""
    for count in range(1, MAX_LOST + 1):
        await until(lambda count=count: sum(fleet.num_submitted) == count)
        for link, submitted in zip(fleet.links, fleet.num_submitted, strict=True):
            if submitted:
                link.kill()


@pytest.mark.parametrize("blind", [False, True], ids=["", "the router says nothing"])
async def test_a_request_that_takes_replicas_with_it_is_not_given_to_all(*, blind: bool) -> None:
    """It may be why they die: it waits for them to come back, and for no longer than for any replica."""
    async with direct_fleet(MAX_LOST + 2, QUIET) as fleet:
        await fleet.client.wait_ready(STEP_S)
        await fleet.until_known(*[READY] * (MAX_LOST + 2))
        if blind:
            fleet.blind_router()
        generating = asyncio.create_task(fleet.client.generate([1], max_tokens=1, text=False))
        await lose_those_that_have_it(fleet)
        await until(lambda: not any(each.inflight for each in fleet.known.replicas()))
        with advanced_clock() as clock:
            for _ in range(3):
                await clock.advance(QUIET.wait_ready_s / 4)
                assert not generating.done()
            await clock.advance(QUIET.wait_ready_s)
            with refuses(ReplicaLostError, says="may have died of it"):
                await generating
        assert sum(fleet.num_submitted) == MAX_LOST


async def test_a_request_that_took_replicas_with_it_ends_when_they_start_again() -> None:
    """They are other runs of the daemon then: those that had it have died."""
    async with direct_fleet(MAX_LOST + 1, QUIET) as fleet, AsyncExitStack() as stack:
        await fleet.client.wait_ready(STEP_S)
        await fleet.until_known(*[READY] * (MAX_LOST + 1))
        generating = asyncio.create_task(fleet.client.generate([1], max_tokens=1, text=False))
        await lose_those_that_have_it(fleet)
        others = [await stack.enter_async_context(replica()) for _ in range(MAX_LOST)]
        lost = [link for link, submitted in zip(fleet.links, fleet.num_submitted, strict=True) if submitted]
        for link, other in zip(lost, others, strict=True):
            link.target = other.address
            await link.listen_again()
        with refuses(ReplicaLostError, says="died with this request"):
            await generating
        assert sum(fleet.num_submitted) == MAX_LOST
        assert [each.engine.requests for each in others] == [[]] * MAX_LOST


async def test_a_fault_of_the_client_does_not_end_its_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks is told of it, and the router is called again."""
    async with direct_fleet(1) as fleet:
        let_talk(fleet.daemons[0].engine, 0)
        told = KnownReplica.tell
        is_broken = True

        def tell(replica: KnownReplica, *told_of_it: Any) -> None:
            if is_broken:
                raise ValueError("a fault")
            told(replica, *told_of_it)

        monkeypatch.setattr(KnownReplica, "tell", tell)
        with refuses(GenserveError, says="a fault"):
            await fleet.client.generate([1], timeout_s=20)
        is_broken = False
        await fleet.until_known(READY)
        await fleet.client.generate([1], max_tokens=1, text=False, timeout_s=20)
