"""LoRA adapters through a router: on all replicas, or the error says on which one not."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from genserve.client import AsyncClient
from genserve.errors import (
    EngineDeadError,
    GenserveError,
    LoraNotFoundError,
    PushConflictError,
    PushRolledBackError,
    VersionNotNewerError,
)
from genserve.fleet.push import fleet_push
from genserve.fleet.push.commit import commit_everywhere
from genserve.routing.replica import ReplicaState
from tests.fleet.routers import QUICK, RoutedFleet, adapting, hold, over, push, until_reached
from tests.support.breakable_link import BreakableLink
from tests.support.patience import until
from tests.support.pulled_peers import weights
from tests.support.scripted_adapter import CONFIG, TENSORS
from tests.support.scripted_engine import Gate

NAME = "poet"


def having(fleet: RoutedFleet) -> list[bool]:
    """Whether each engine has the adapter."""
    return [NAME in daemon.engine.loras.files for daemon in fleet.daemons]


async def test_an_adapter_is_pushed_to_all(fleet: RoutedFleet) -> None:
    """The weights and their version stay, and no replica is out of rotation."""
    result = await fleet.client.push_lora(NAME, TENSORS, CONFIG, version=5)
    assert (result.push.state, result.push.weight_version, result.state.weight_version) == ("applied", 5, 0)
    assert having(fleet) == [True] * 3
    assert len(fleet.running.router.fleet.ready) == 3
    found = [(each.name, each.running_requests, each.version) for each in await fleet.client.list_loras()]
    assert found == [(NAME, 6, 5)]
    assert (await fleet.client.push_lora(NAME, TENSORS, CONFIG)).push.weight_version == 6
    with pytest.raises(VersionNotNewerError):
        await fleet.client.push_lora(NAME, TENSORS, CONFIG, version=6)
    fleet.daemons[1].engine.loras.versions[NAME] = 4
    assert [each.version for each in await fleet.client.list_loras()] == [4], "all have at least this one"
    await fleet.client.unload_lora(NAME)
    assert having(fleet) == [False] * 3


async def test_an_adapter_that_one_replica_does_not_load_is_no_success(fleet: RoutedFleet) -> None:
    """The error names it. It goes on serving, and a repeat of the push loads the adapter there too."""
    failing = fleet.daemons[1]
    failing.engine.fails["load_lora"] = PushRolledBackError("no room for it")
    with pytest.raises(PushRolledBackError) as caught:
        await fleet.client.push_lora(NAME, TENSORS, CONFIG, push_id="p", version=3)
    assert f"{failing.address}: no room for it" in caught.value.message
    assert caught.value.metadata["loaded_by"] == "2"
    assert having(fleet) == [True, False, True]
    assert len(fleet.running.router.fleet.ready) == 3
    await fleet.client.push_lora(NAME, TENSORS, CONFIG, push_id="p", version=3)
    assert having(fleet) == [True] * 3
    assert [daemon.engine.loras.versions[NAME] for daemon in fleet.daemons] == [3] * 3
    assert [daemon.engine.calls.count(f"load_lora {NAME}") for daemon in fleet.daemons] == [1, 2, 1]


async def test_other_tensors_under_the_id_of_a_push_are_not_told_as_applied(fleet: RoutedFleet) -> None:
    """Its replicas would drop them, and serve the first ones."""
    await fleet.client.push_lora(NAME, TENSORS, CONFIG, push_id="p")
    with pytest.raises(PushConflictError):
        await fleet.client.push_lora(NAME, {name: 2 * tensor for name, tensor in TENSORS.items()}, CONFIG, push_id="p")


@pytest.mark.parametrize("had", [False, True])
async def test_a_directory_that_one_replica_does_not_load_is_loaded_by_none(
    fleet: RoutedFleet, tmp_path: Path, had: bool
) -> None:
    """Unless they had one of this name: what it was is not known any more."""
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": ["q"]}))
    if had:
        await fleet.client.load_lora(NAME, tmp_path)
        for each in fleet.running.router.fleet.ready:
            each.member.has_loras([NAME])  # as their next report tells
    fleet.daemons[1].engine.fails["load_lora"] = PushRolledBackError("no room for it")
    with pytest.raises(PushRolledBackError, match="no room for it"):
        await fleet.client.load_lora(NAME, tmp_path)
    assert having(fleet) == [had] * 3
    assert (await fleet.client.load_lora(NAME, tmp_path)).name == NAME
    assert having(fleet) == [True] * 3


async def test_an_adapter_that_no_replica_loads_is_told_by_one(fleet: RoutedFleet) -> None:
    """That nobody knows what one of them has done counts for more than a refusal."""
    for daemon, error in zip(fleet.daemons, (PushRolledBackError, EngineDeadError, PushRolledBackError), strict=True):
        daemon.engine.fails["load_lora"] = error("not now")
    with pytest.raises(EngineDeadError, match="not now"):
        await fleet.client.push_lora(NAME, TENSORS, CONFIG)
    assert len(fleet.running.router.fleet.ready) == 3, "the weights are what they were"
    assert having(fleet) == [False] * 3
    with pytest.raises(LoraNotFoundError):
        await fleet.client.unload_lora(NAME)


async def test_joining_replica_loads_adapters_from_directories(fleet: RoutedFleet, tmp_path: Path) -> None:
    """Until another one is pushed under its name, which is brought instead."""
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": ["q"]}))
    await fleet.client.load_lora(NAME, tmp_path)
    async with adapting() as late, adapting() as later:
        for number, daemon in enumerate((late, later)):
            await fleet.client.add_replica(daemon.address)
            await fleet.until_ready(4 + number)
            if daemon is late:
                await until(lambda: NAME in late.engine.loras.files)
                await fleet.client.push_lora(NAME, TENSORS, CONFIG)
        await until(lambda: NAME in later.engine.loras.files)
        assert later.engine.loras.files[NAME].push_id


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """The push "p" of an adapter: all replicas have staged it, and are told to load it when the test says so."""
    held = Gate()

    async def later(fleet: Any, replicas: Any, request: Any, push: Any) -> Any:
        if request.push_id == "p":
            held.reached.set()
            await held.open.wait()
        return await commit_everywhere(fleet, replicas, request, push)

    monkeypatch.setattr(fleet_push, "commit_everywhere", later)
    return held


async def test_an_adapter_that_is_about_to_be_loaded_stays_beside_new_weights(fleet: RoutedFleet, staged: Gate) -> None:
    """They do not take its place."""
    pushing = asyncio.create_task(fleet.client.push_lora(NAME, TENSORS, CONFIG, push_id="p"))
    await until_reached(staged)
    await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
    staged.open.set()
    assert (await pushing).push.state == "applied"
    assert having(fleet) == [True] * 3
    assert all(hold(1, daemon) for daemon in fleet.daemons)


async def test_an_adapter_does_not_hide_what_became_of_a_commit_of_weights(staged: Gate) -> None:
    """It is to be loaded while the engine exchanges the weights; then the answers about both are lost."""
    async with adapting() as daemon, BreakableLink(daemon.address) as link, over([], QUICK) as fleet:
        fleet.running.router.add(link.address)
        await fleet.until_ready(1)
        adapter = asyncio.create_task(fleet.client.push_lora(NAME, TENSORS, CONFIG, push_id="p"))
        await until_reached(staged)
        gate = daemon.engine.gates["commit_weights"] = Gate()
        pushing = asyncio.create_task(fleet.client.push_weights(weights(1), version=1, timeout_s=20))
        await until_reached(gate)
        staged.open.set()
        await until(lambda: daemon.registry.live["p"].lifecycle.is_busy)
        link.kill()
        for told in adapter, pushing:
            with pytest.raises(GenserveError):
                await told
        gate.open.set()
        await until(lambda: hold(1, daemon))
        await link.listen_again()
        await fleet.until_ready(1)
        assert (await fleet.client.status()).state.weight_version == 1


async def test_a_repeat_after_an_unload_loads_the_adapter_again(fleet: RoutedFleet) -> None:
    """Or is refused: it is not told to be applied where nothing is loaded."""
    await fleet.client.push_lora(NAME, TENSORS, CONFIG, push_id="p", version=1)
    await fleet.client.unload_lora(NAME)
    assert (await fleet.client.push_lora(NAME, TENSORS, CONFIG, push_id="p", version=1)).push.state == "applied"
    assert having(fleet) == [True] * 3


async def test_a_repeat_with_force_brings_an_adapter_back(fleet: RoutedFleet) -> None:
    """What is told to be applied is what serves."""
    other = {name: 2 * tensor for name, tensor in TENSORS.items()}
    await fleet.client.push_lora(NAME, TENSORS, CONFIG, push_id="p", version=1)
    await fleet.client.push_lora(NAME, other, CONFIG, push_id="q", version=2)
    result = await fleet.client.push_lora(NAME, TENSORS, CONFIG, push_id="p", version=1, force=True)
    (lora,) = await fleet.client.list_loras()
    await fleet.client.unload_lora(NAME)
    assert (result.push.state, lora.source, lora.version) == ("applied", "push p", 1)


async def test_adapter_commit_waiting_for_its_turn_blocks_no_weights(fleet: RoutedFleet) -> None:
    """Somebody may be loading another one under its name, which takes long."""
    await fleet.client.push_lora(NAME, TENSORS, CONFIG, push_id="p")
    turn = fleet.running.router.fleet.lora_turns.of(NAME)
    async with asyncio.TaskGroup() as group, turn:
        group.create_task(fleet.client.commit_push("p"))
        await until(lambda: "waiters:1" in repr(turn))
        await fleet.client.push_weights(weights(1), version=1)
    assert all(hold(1, daemon) for daemon in fleet.daemons)


async def test_a_daemon_that_shuts_down_does_not_end_the_push_of_an_adapter(fleet: RoutedFleet, staged: Gate) -> None:
    """It refuses to load what it has staged; the others do, and who joins gets it from them."""
    leaving = fleet.daemons[1]
    pushing = asyncio.create_task(fleet.client.push_lora(NAME, TENSORS, CONFIG, push_id="p"))
    await until_reached(staged)
    leaving.engine.idle.clear()
    async with AsyncClient(leaving.address) as alone:
        await alone.drain()
    await until(lambda: fleet.state(leaving) is ReplicaState.DRAINING)
    staged.open.set()
    assert (await pushing).push.state == "applied"
    assert having(fleet) == [True, False, True]
    assert fleet.running.router.fleet.desired.pushed_loras == {NAME: "p"}


async def test_an_adapter_that_waits_for_its_turn_keeps_no_version_away(fleet: RoutedFleet) -> None:
    """All replicas have it staged, and somebody is loading another one under its name, which takes long."""
    await push(fleet.running.address, 2)
    turn = fleet.running.router.fleet.lora_turns.of(NAME)
    async with asyncio.TaskGroup() as group, turn:
        group.create_task(fleet.client.push_lora(NAME, TENSORS, CONFIG))
        await until(lambda: "waiters:1" in repr(turn))
        await push(fleet.daemons[1].address, 1, force=True)
        await until(lambda: hold(2, fleet.daemons[1]))
    assert having(fleet) == [True] * 3


async def test_a_repeat_that_names_a_version_brings_that_one_to_all(fleet: RoutedFleet) -> None:
    """Each replica has counted by itself the first time."""
    await fleet.client.push_lora(NAME, TENSORS, CONFIG, push_id="p")
    result = await fleet.client.push_lora(NAME, TENSORS, CONFIG, push_id="p", version=7)
    assert result.push.weight_version == 7
    assert [daemon.engine.loras.versions[NAME] for daemon in fleet.daemons] == [7] * 3
