"""`genserve replicas`, `status` and `drain` against a router."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator

import pytest

from genserve.cli import main, make_parser
from genserve.control.conditions import DaemonCondition
from genserve.fleet.config import RouteConfig
from genserve.net import DEFAULT_ROUTER
from genserve.routing.replica import ReplicaState, Request
from tests.fleet.routers import RoutedFleet, linked, push, replica, routed
from tests.support.commands import Command, Outcome, start
from tests.support.patience import until
from tests.support.silent_daemon import silent_socket


@pytest.fixture
async def fleet() -> AsyncIterator[RoutedFleet]:
    async with routed(2) as running:
        yield running


@pytest.fixture
def genserve(fleet: RoutedFleet, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command against the router; gives exit status, stdout and stderr."""

    async def run(*arguments: str, target: str = fleet.running.address) -> Outcome:
        status = await asyncio.to_thread(main, [*arguments, "--target", target])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


async def test_the_table_has_a_line_for_each_replica(fleet: RoutedFleet, genserve: Command) -> None:
    """In order of their addresses; the scripted engines report 3 running and 2 waiting requests."""
    status, output, _ = await genserve("replicas", "list")
    version, header, *lines = output.splitlines()
    assert (status, version) == (0, "version 0")
    assert header.split() == ["REPLICA", "STATE", "VERSION", "RUNNING", "WAITING", "INFLIGHT", "TOKENS/S"]
    assert [line.split() for line in lines] == [
        [daemon.address, "ready", "0", "3", "2", "0", "0"] for daemon in fleet.daemons
    ]


async def test_the_table_says_why_ready_replicas_generate_nothing(fleet: RoutedFleet, genserve: Command) -> None:
    """They are paused."""
    await fleet.client.pause()
    paused = fleet.running.router.fleet
    await until(lambda: all(up.member.engine is not None and up.member.engine.pauses for up in paused.ready))
    _, output, _ = await genserve("replicas", "list")
    assert output.count("it is paused") == 2


async def test_the_table_does_not_give_up_a_version_whose_holder_is_away(genserve: Command) -> None:
    """It may be back in a moment."""
    async with linked(1) as fleet:
        await push(fleet.running.address, 3)
        fleet.links[0].kill()
        await until(lambda: not fleet.running.router.fleet.ready)
        _, output, _ = await genserve("replicas", "list", target=fleet.running.address)
        assert output.startswith("version 3, which no replica that answers serves: push it again if ")


async def test_json_has_zeros(genserve: Command) -> None:
    """A program that reads the version should not have to know that 0 may be missing."""
    listed = json.loads((await genserve("replicas", "list", "--json"))[1])
    assert listed["weightVersion"] == 0
    assert [each["inflight"] for each in listed["replicas"]] == [0, 0]
    assert listed["decisions"] == [{"policy": "requests", "numRequests": "0"}]


async def test_add_drain_and_remove_print_the_replicas_that_are_left(fleet: RoutedFleet, genserve: Command) -> None:
    """With the new one, and without the one that was drained or removed."""
    async with replica() as other:
        assert other.address in (await genserve("replicas", "add", other.address))[1]
        await fleet.until_ready(3)
        for action, address in (("drain", other.address), ("remove", fleet.daemons[0].address)):
            status, output, _ = await genserve("replicas", action, address)
            assert status == 0
            assert address not in output
            assert fleet.daemons[1].address in output


async def test_a_drain_that_takes_long_says_that_it_goes_on(fleet: RoutedFleet, genserve: Command) -> None:
    """It has requests; --timeout bounds the wait only."""
    address = fleet.daemons[0].address
    with fleet.running.router.fleet.carrying(Request(), fleet.running.router.find(address)):
        for timeout_s in (0.1, 5, 25):  # a busy machine may take longer to bring it there
            _, _, errors = await genserve("replicas", "drain", address, "--timeout", f"{timeout_s}s")
            assert errors == (
                f"genserve: DEADLINE_EXCEEDED: {address} still has requests after {timeout_s} s, or no other replica "
                "is known to have the version of the fleet: if `genserve replicas list` shows it as draining, it goes "
                f"on: `genserve replicas add {address}` ends that\n"
            )
            if fleet.state(fleet.daemons[0]) is ReplicaState.DRAINING:
                break
        assert "it is being drained" in (await genserve("replicas", "list"))[1]


async def test_an_interrupted_drain_says_that_it_goes_on(fleet: RoutedFleet) -> None:
    """Whoever has ended the command may take it to be undone."""
    leaving = fleet.daemons[0]
    with fleet.running.router.fleet.carrying(Request(), fleet.running.router.find(leaving.address)):
        process = await start(fleet.running.address, "replicas", "drain", leaving.address)
        await until(lambda: fleet.state(leaving) is ReplicaState.DRAINING)
        process.send_signal(signal.SIGINT)
        output, errors = await process.communicate()
        assert (process.returncode, output) == (130, b"")
        assert f"stopped waiting for {leaving.address}" in errors.decode() and "it goes on" in errors.decode()
        await fleet.until_reported()
        assert fleet.state(leaving) is ReplicaState.DRAINING


async def test_wait_tells_a_router_that_shuts_down(fleet: RoutedFleet, genserve: Command) -> None:
    """At once: no time is over."""
    fleet.running.router.refuse()
    status, _, errors = await genserve("replicas", "wait", "3")
    assert status == 1 and "the router has shut down: 2 of 3 replicas were ready" in errors


async def test_wait_returns_when_so_many_replicas_are_ready(fleet: RoutedFleet, genserve: Command) -> None:
    """Or says what the others do instead."""
    assert "2 of 3 replicas are ready" in await waiting_in_vain(genserve)
    async with replica() as other:
        waiting = asyncio.create_task(genserve("replicas", "wait", "3"))
        await fleet.client.add_replica(other.address)
        status, output, _ = await waiting
        assert status == 0 and other.address in output
        other.board.become(DaemonCondition.DRAINING)
        await until(lambda: fleet.running.router.fleet.in_state(ReplicaState.DRAINING))
        assert f"{other.address}: it is shutting down" in await waiting_in_vain(genserve)


async def waiting_in_vain(genserve: Command) -> str:
    """What it says when three replicas are not ready in time. A busy machine takes longer than a moment to ask."""
    for timeout in ("100ms", "5s", "25s"):
        status, _, errors = await genserve("replicas", "wait", "3", "--timeout", timeout)
        assert status == 1
        if "did not name its replicas" not in errors:
            break
    return errors


async def test_wait_does_not_take_a_router_that_says_nothing_for_one_without_replicas(genserve: Command) -> None:
    """Nobody knows how many it has."""
    async with silent_socket() as target:
        status, _, errors = await genserve("replicas", "wait", "3", "--timeout", "100ms", target=target)
    assert status == 1
    assert errors == "genserve: DEADLINE_EXCEEDED: the router did not name its replicas within 0.1 s\n"


async def test_a_daemon_is_named_as_what_it_is(fleet: RoutedFleet, genserve: Command) -> None:
    """Who forgets --target calls a daemon, where both are on one host."""
    status, _, errors = await genserve("replicas", "list", target=fleet.daemons[0].address)
    assert status == 1
    assert errors.startswith("genserve: UNSUPPORTED: --target is not the address of a router: ")


def test_the_commands_look_for_the_router_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default both."""
    monkeypatch.delenv("GENSERVE_TARGET", raising=False)
    config, route = RouteConfig(), make_parser().parse_args(["route"])
    assert f"{config.host}:{config.port}" == f"{route.host}:{route.port}" == DEFAULT_ROUTER
    assert make_parser().parse_args(["replicas", "list"]).default_target == DEFAULT_ROUTER


async def test_drain_shuts_down_its_target_and_says_what_runs(fleet: RoutedFleet, genserve: Command) -> None:
    """A daemon of the fleet, which gets no more requests, and then the router."""
    leaving, staying = fleet.daemons
    assert await genserve("drain", target=leaving.address) == (0, "draining: 3 running, 2 waiting\n", "")
    assert leaving.stopped.limit_s(30) == 30 and not fleet.stopped.is_set()
    await until(lambda: fleet.state(leaving) is ReplicaState.DRAINING)
    status, output, _ = await genserve("drain", "--drain-timeout", "90s")
    assert (status, output.split(":")[0], fleet.stopped.limit_s(30)) == (0, "draining", 90)
    assert not staying.stopped.is_set()
