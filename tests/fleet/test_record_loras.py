"""Adapters that a fleet has loaded from directories, when others take their place."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from genserve.client import AsyncClient
from genserve.errors import (
    InvalidFieldError,
    LastReplicaError,
    LoraNotFoundError,
    NoReplicaError,
    PushRolledBackError,
)
from genserve.fleet.member import Member
from genserve.fleet.push.adapters import bring_pushed_lora
from genserve.routing.replica import ReplicaState
from tests.fleet.routers import (
    RoutedFleet,
    adapting,
    hold,
    linked,
    loaded,
    over,
    push,
    replica,
    restarted,
    until_reached,
)
from tests.support.patience import until
from tests.support.refusals import refuses
from tests.support.scripted_adapter import CONFIG, TENSORS, adapter
from tests.support.scripted_daemon import Daemon
from tests.support.scripted_engine import Gate


async def test_a_pushed_adapter_is_not_replaced_from_a_directory(tmp_path: Path) -> None:
    """What LoadLora had loaded under its name before is out of date: who joins gets the pushed one."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over(daemons[:1]) as fleet:
            await fleet.until_ready(1)
            await fleet.client.load_lora("poet", adapter(tmp_path))
            await fleet.client.push_lora("poet", TENSORS, CONFIG, version=5, push_id="p")
            fleet.running.router.add(daemons[1].address)
            await fleet.until_ready(2)
            await until(lambda: "poet" in daemons[1].engine.loras.files)
            await fleet.until_reported()
            assert loaded(daemons[1]) == ("push p", 5)


def tensors_of(daemon: Daemon) -> dict[str, Any]:
    """Of the adapter that is loaded, as vLLM reads them."""
    return dict(load_file(Path(daemon.engine.loras.files["poet"].directory) / "adapter_model.safetensors"))


def members(fleet: RoutedFleet) -> list[Member]:
    """What the router knows of its replicas."""
    return fleet.running.router.fleet.members


async def test_joining_replica_gets_pushed_adapters() -> None:
    """From a replica that has it: its tensors, its configuration and its version."""
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over([first]) as fleet:
            await fleet.until_ready(1)
            await fleet.client.push_lora("poet", TENSORS, CONFIG, version=5, push_id="p")
            assert b"poet" in first.board.membership.record.content, "the router may be killed from now on"
            fleet.running.router.add(second.address)
            await until(lambda: "poet" in second.engine.loras.files)
            assert loaded(first) == loaded(second) == ("push p", 5)
            assert {name: each.tolist() for name, each in tensors_of(second).items()} == {
                name: each.tolist() for name, each in TENSORS.items()
            }
            await until(lambda: all(each.as_replica(ReplicaState.READY).lora_names for each in members(fleet)))


async def test_replica_with_another_adapter_of_that_name_gets_no_requests() -> None:
    """Until it has that of the fleet: it was away when that was pushed. Other requests reach it."""
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(adapting()) for _ in range(2)]
        other = {name: 2 * tensor for name, tensor in TENSORS.items()}
        async with AsyncClient(second.address) as alone:
            await alone.push_lora("poet", other, CONFIG, version=9, push_id="old")
        async with over([first]) as fleet:
            await fleet.until_ready(1)
            await fleet.client.push_lora("poet", TENSORS, CONFIG, version=5, push_id="p")
            gate = second.engine.gates["load_lora"] = Gate()
            fleet.running.router.add(second.address)
            await until(gate.reached.is_set)
            late = fleet.running.router.find(second.address).member
            replicas = {each.address: each for each in fleet.running.router.fleet.replicas()}
            assert replicas[second.address].state is ReplicaState.READY
            assert replicas[second.address].lora_names == frozenset()
            listed = {each.address: each.reason for each in (await fleet.client.list_replicas()).replicas}
            assert "'poet'" in listed[second.address] and not listed[first.address]
            gate.open.set()
            await until(lambda: late.as_replica(ReplicaState.READY).lora_names == {"poet"})
            assert loaded(second) == ("push p", 5)


async def test_record_keeps_an_adapter_until_another_takes_its_place() -> None:
    """The record of an epoch says one thing, also while replicas load."""
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(adapting())
        async with over([daemon]) as fleet:
            await fleet.until_ready(1)
            await fleet.client.push_lora("poet", TENSORS, CONFIG, push_id="first")
            before = fleet.running.router.fleet.record()
            gate = daemon.engine.gates["load_lora"] = Gate()
            pushing = asyncio.create_task(fleet.client.push_lora("poet", TENSORS, CONFIG, push_id="second"))
            await gate.reached.wait()
            meanwhile = fleet.running.router.fleet.record()
            gate.open.set()
            await pushing
            assert meanwhile == before
            after = fleet.running.router.fleet.record()
            assert before is not None and after is not None and after.epoch > before.epoch
            assert [lora.push_id for lora in after.loras] == ["second"]


async def test_new_router_gives_pushed_adapters_to_joining_replicas() -> None:
    """It reads in the record which there are; one that was unloaded is not among them."""
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over([first]) as fleet:
            await fleet.until_ready(1)
            for name in ("poet", "gone"):
                await fleet.client.push_lora(name, TENSORS, CONFIG, push_id=name)
            await fleet.client.unload_lora("gone")
            async with restarted(fleet) as again:
                await again.until_ready(1)
                again.running.router.add(second.address)
                await until(lambda: "poet" in second.engine.loras.files)
                await again.until_reported()
                assert second.engine.loras.files.keys() == {"poet"}


async def test_the_only_replica_with_an_adapter_is_not_drained() -> None:
    """The other one cannot take it."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(adapting())
        second = await stack.enter_async_context(replica())
        async with over([first]) as fleet:
            await fleet.until_ready(1)
            await fleet.client.push_lora("poet", TENSORS, CONFIG, push_id="p")
            fleet.running.router.add(second.address)
            await fleet.until_ready(2)
            with refuses(LastReplicaError, says="adapter 'poet'"):
                await fleet.client.drain_replica(first.address)
            await fleet.client.drain_replica(first.address, force=True)


async def test_an_adapter_is_loaded_once_on_each_replica(tmp_path: Path) -> None:
    """They tell that they have it a while after they have loaded it."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over(daemons) as fleet:
            await fleet.until_ready(2)
            for number in range(4):
                await fleet.client.load_lora(f"poet {number}", adapter(tmp_path))
                await fleet.until_reported()
            for daemon in daemons:
                loads = [call for call in daemon.engine.calls if call.startswith("load_lora")]
                assert loads == [f"load_lora poet {number}" for number in range(4)]


async def test_an_adapter_that_is_being_unloaded_is_not_loaded_again(tmp_path: Path) -> None:
    """One replica has done it, and another one takes its time."""
    async with linked(2, opened=adapting) as fleet:
        link, one = fleet.links
        await fleet.client.load_lora("poet", adapter(tmp_path))
        members = fleet.running.router.fleet.members
        await until(lambda: all(each.lora_names == {"poet"} for each in members))
        link.silence()
        unloading = asyncio.create_task(fleet.client.unload_lora("poet"))
        done = fleet.running.router.find(one.address).member
        await until(lambda: done.lora_names != {"poet"})
        fleet.running.router.fleet.refresh()
        await until_reported_by(fleet, one.address)
        link.let_go()
        await unloading
        await until(lambda: "poet" not in fleet.daemons[1].engine.loras.files)
        assert not any("poet" in daemon.engine.loras.files for daemon in fleet.daemons)


async def test_an_adapter_that_is_unloaded_while_it_is_loaded_stays_away(tmp_path: Path) -> None:
    """The two calls take turns: one replica has loaded it already, and another one takes its time."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        gate = daemons[1].engine.gates["load_lora"] = Gate()
        async with over(daemons) as fleet:
            await fleet.until_ready()
            loading = asyncio.create_task(fleet.client.load_lora("poet", adapter(tmp_path)))
            await until(lambda: gate.reached.is_set() and "poet" in daemons[0].engine.loras.files)
            unloading = asyncio.create_task(fleet.client.unload_lora("poet"))
            await fleet.until_reported()
            assert "poet" in daemons[0].engine.loras.files
            gate.open.set()
            await loading
            await unloading
            await fleet.until_reported()
            assert not any("poet" in daemon.engine.loras.files for daemon in daemons)
            assert not fleet.running.router.fleet.desired.loras


async def test_an_adapter_that_is_unloaded_while_a_replica_gets_it_stays_away(tmp_path: Path) -> None:
    """The replica has just joined."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        gate = daemons[1].engine.gates["load_lora"] = Gate()
        async with over(daemons[:1]) as fleet:
            await fleet.until_ready(1)
            await fleet.client.load_lora("poet", adapter(tmp_path))
            await fleet.client.add_replica(daemons[1].address)
            await until_reached(gate)
            unloading = asyncio.create_task(fleet.client.unload_lora("poet"))
            await fleet.until_reported()
            gate.open.set()
            await unloading
            await fleet.until_reported()
            assert not any("poet" in daemon.engine.loras.files for daemon in daemons)


async def test_an_adapter_that_one_replica_lacks_is_unloaded_on_the_others(tmp_path: Path) -> None:
    """It is what the call is for; if nobody has it, the call says so."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over(daemons) as fleet:
            await fleet.until_ready()
            async with AsyncClient(daemons[1].address) as alone:
                await alone.load_lora("poet", adapter(tmp_path))
            assert (await fleet.client.unload_lora("poet")).name == "poet"
            with pytest.raises(LoraNotFoundError):
                await fleet.client.unload_lora("poet")


async def test_an_adapter_for_which_the_record_has_no_room_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a replica loads it. There is room when another one is unloaded."""
    monkeypatch.setattr("genserve.fleet.desired.MAX_LORAS_BYTES", 2 * len(str(tmp_path)) + 50)
    async with adapting() as daemon, over([daemon]) as fleet:
        await fleet.until_ready()
        path = adapter(tmp_path)
        await fleet.client.load_lora("a", path)
        await fleet.client.load_lora("b", path)
        with refuses(InvalidFieldError, field="path", says="unload"):
            await fleet.client.load_lora("c", path)
        assert "c" not in daemon.engine.loras.files
        await fleet.client.load_lora("b", path)
        await fleet.client.unload_lora("a")
        await fleet.client.load_lora("c", path)


async def test_a_pushed_adapter_that_is_unloaded_while_it_is_brought_is_not_left() -> None:
    """Nobody else would ever take it away."""
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over([first]) as fleet:
            await fleet.until_ready(1)
            await fleet.client.push_lora("poet", TENSORS, CONFIG, version=5, push_id="p")
            gate = second.engine.gates["load_lora"] = Gate()
            fleet.running.router.add(second.address)
            await until_reached(gate)
            unloading = asyncio.create_task(fleet.client.unload_lora("poet"))
            await fleet.until_reported()
            gate.open.set()
            await asyncio.wait({unloading})
            async with AsyncClient(second.address) as client:
                while (await client.get_push("p")).push.state != "applied":
                    await fleet.until_reported()
            await until(lambda: not second.engine.loras.files)
            await fleet.until_reported()
            assert not first.engine.loras.files and not second.engine.loras.files


async def test_replica_waiting_for_an_adapter_gets_the_fleets_version(tmp_path: Path) -> None:
    """Somebody loads another one under its name, which hangs on another replica."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over(daemons) as fleet, AsyncClient(daemons[1].address) as alone:
            await fleet.until_ready(2)
            await push(fleet.running.address, 2)
            await fleet.client.load_lora("poet", adapter(tmp_path))
            member = fleet.running.router.find(daemons[1].address).member
            await until(lambda: member.lora_names == {"poet"})
            async with fleet.running.router.fleet.lora_turns.of("poet"):
                await alone.unload_lora("poet")
                await until(lambda: member.lora_names == set())
                await fleet.until_reported()
                await push(daemons[1].address, 1, force=True)
                await until(lambda: hold(2, daemons[1]))
            await until(lambda: "poet" in daemons[1].engine.loras.files)


async def test_what_is_no_adapter_is_not_brought_as_one() -> None:
    """A replica tells that a push has brought an adapter, and sends weights."""
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over([first, second]) as fleet:
            await fleet.until_ready(2)
            await push(fleet.running.address, 3, push_id="p")
            for each in (first, second):
                fleet.unwatched(each)
            known = fleet.running.router.fleet
            known.upstreams[first.address].member.has_loras(["poet"], {"poet": "p"})
            with refuses(NoReplicaError, says="adapter 'poet'"):
                await bring_pushed_lora(known, known.upstreams[second.address], "poet", "p")


async def until_reported_by(fleet: RoutedFleet, address: str) -> None:
    """Waits until a replica has told its state, which it does often."""
    member = fleet.running.router.find(address).member
    for _ in range(3):
        before = member.engine
        await until(lambda before=before: member.engine is not before)  # type: ignore[misc]


async def test_unloaded_adapter_is_not_left_behind_when_loading_fails_elsewhere(tmp_path: Path) -> None:
    """A replica tells a while after an unload that it does not have the adapter any more."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        async with over(daemons) as fleet:
            await fleet.until_ready(2)
            await fleet.client.load_lora("poet", adapter(tmp_path))
            await fleet.client.unload_lora("poet")
            for _ in range(2):
                daemons[1].engine.fails["load_lora"] = PushRolledBackError("no room for it")
                with pytest.raises(PushRolledBackError):
                    await fleet.client.load_lora("poet", adapter(tmp_path))
                assert not any(daemon.engine.loras.files for daemon in daemons)


async def test_an_adapter_is_loaded_on_all_though_its_caller_has_left(tmp_path: Path) -> None:
    """Replicas load it to its end: who joins would lack it, and nobody would take it away if one of them fails."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(2)]
        gate = daemons[1].engine.gates["load_lora"] = Gate()
        async with over(daemons) as fleet:
            await fleet.until_ready(2)
            loading = asyncio.create_task(fleet.client.load_lora("poet", adapter(tmp_path)))
            await until(lambda: gate.reached.is_set() and "poet" in daemons[0].engine.loras.files)
            loading.cancel()
            await asyncio.wait({loading})
            await fleet.until_reported()
            gate.open.set()
            await until(lambda: "poet" in fleet.running.router.fleet.desired.loras)
            assert all("poet" in daemon.engine.loras.files for daemon in daemons)


@pytest.mark.parametrize("pushed", [False, True])
async def test_another_adapter_of_the_name_gives_way_where_a_replica_joins(tmp_path: Path, pushed: bool) -> None:
    """It becomes what the fleet is, whatever it was before; and also later, if somebody loads one there alone."""
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(adapting()) for _ in range(2)]
        alone = await stack.enter_async_context(AsyncClient(second.address))
        (tmp_path / "other").mkdir()

        async def load_alone() -> None:
            if pushed:
                await alone.push_lora("poet", TENSORS, CONFIG)
            else:
                await alone.load_lora("poet", adapter(tmp_path / "other"))

        await load_alone()
        async with over([first]) as fleet:
            await fleet.until_ready(1)
            await fleet.client.load_lora("poet", f"{adapter(tmp_path)}/.")
            fleet.running.router.add(second.address, joins=True)
            await until(lambda: loaded(second) == (str(tmp_path), 2))
            await fleet.until_reported()
            await load_alone()
            await until(lambda: loaded(second) == (str(tmp_path), 4))
            await fleet.until_reported()
            assert [loaded(each) for each in (first, second)] == [(str(tmp_path), 1), (str(tmp_path), 4)]


async def test_a_replica_that_hangs_over_an_adapter_keeps_it_from_no_other_one(tmp_path: Path) -> None:
    """Both have joined, or have come back."""
    async with AsyncExitStack() as stack:
        daemons = [await stack.enter_async_context(adapting()) for _ in range(3)]
        gate = daemons[1].engine.gates["load_lora"] = Gate()
        async with over(daemons[:1]) as fleet:
            await fleet.until_ready(1)
            await fleet.client.load_lora("poet", adapter(tmp_path))
            fleet.running.router.add(daemons[1].address)
            await until_reached(gate)
            fleet.running.router.add(daemons[2].address)
            await until(lambda: "poet" in daemons[2].engine.loras.files)
            assert "poet" not in daemons[1].engine.loras.files
            gate.open.set()
            await until(lambda: "poet" in daemons[1].engine.loras.files)
