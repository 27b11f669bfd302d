"""What is asked of all replicas does not fail because one of them leaves meanwhile."""

import asyncio
import json
from pathlib import Path

from safetensors.torch import save_file

from genserve.client import AsyncClient
from genserve.engine.types import MEMORY_TAGS
from genserve.routing.replica import ReplicaState
from tests.fleet.routers import RoutedFleet, push, until_reached
from tests.support.patience import until
from tests.support.scripted_adapter import CONFIG, TENSORS
from tests.support.scripted_engine import Gate

NAME = "poet"


def asleep(fleet: RoutedFleet) -> list[bool]:
    """Whether each of those that stay sleeps."""
    return [daemon.engine.asleep == MEMORY_TAGS for daemon in (fleet.daemons[0], fleet.daemons[2])]


async def test_a_replica_that_is_removed_meanwhile_does_not_end_a_sleep(fleet: RoutedFleet) -> None:
    """The others would be woken up."""
    removed = fleet.daemons[1]
    removed.engine.gates["sleep"] = gate = Gate()
    async with asyncio.TaskGroup() as group:
        group.create_task(fleet.client.sleep())
        await until_reached(gate)
        await fleet.client.remove_replica(removed.address)
        gate.open.set()
    assert asleep(fleet) == [True] * 2


async def test_a_daemon_that_shuts_down_is_in_the_way_of_nothing(fleet: RoutedFleet, tmp_path: Path) -> None:
    """It may take long until its last request has ended, and it refuses all that is new."""
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": ["q"]}))
    await fleet.client.load_lora("former", tmp_path)
    await push(fleet.running.address, 1)
    leaving = fleet.daemons[1]
    leaving.engine.idle.clear()
    async with AsyncClient(leaving.address) as alone:
        await alone.drain()
    await until(lambda: fleet.state(leaving) is ReplicaState.DRAINING)
    await fleet.client.unload_lora("former")
    await fleet.client.load_lora(NAME, tmp_path)
    assert [list(daemon.engine.loras.files) for daemon in fleet.daemons] == [[NAME], ["former"], [NAME]]
    await fleet.client.sleep()
    assert asleep(fleet) == [True] * 2
    await fleet.client.wake_up()
    assert asleep(fleet) == [False] * 2
