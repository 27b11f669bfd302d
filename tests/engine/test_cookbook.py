"""The recipes of docs/cookbook.md against a real daemon, and a real router in front of it: with grpcurl, and with buf.

Those with TLS and a token are in test_secured.py.
"""

import ast
import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from genserve.client import AsyncClient
from genserve.errors import PushNotFoundError
from genserve.v1 import generation_pb2
from tests.engine.cookbook import BLOCKS, PAGE, Shell, definitions, recipe
from tests.engine.outputs import next_version
from tests.support.daemon_process import DaemonProcess
from tests.support.models import load_tensors
from tests.support.router_process import RouterProcess

CALLS = definitions(Path(__file__).name)
STATUS = recipe("'{}' | call genserve.v1.ControlService/GetStatus\n")


@pytest.fixture(params=["grpcurl", "buf"])
def shell(request: pytest.FixtureRequest, daemon: DaemonProcess, tmp_path: Path) -> Shell:
    """One in which `call` reaches the daemon."""
    return Shell(CALLS[request.param], daemon.address, tmp_path)


@pytest.fixture(scope="module")
def router(daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """A router whose one replica is the daemon."""
    flags = ["--replica", daemon.address, "--port", "0"]
    process = RouterProcess(flags, tmp_path_factory.mktemp("router") / "stderr")
    try:
        yield process
    finally:
        process.kill()


async def test_the_health_and_the_status(shell: Shell) -> None:
    assert await shell.asked(recipe("Health/Check")) == {"status": "SERVING"}
    told = await shell.asked(STATUS)
    assert told["state"]["phase"] == "PHASE_RUNNING"
    assert told["state"]["pauses"] == [] and told["pushes"] == []


async def test_the_watch_tells_the_status_again_and_again(shell: Shell) -> None:
    done = await shell.run(recipe("WatchStatus"))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 60
    assert done.stdout.count('"phase": "PHASE_RUNNING"') > 1


async def test_holder_of_a_pause_is_found_and_resumed(shell: Shell, client: AsyncClient) -> None:
    """The others' leases stay."""
    theirs = (await client.pause(holder="somebody", ttl_s=300)).lease.lease_id
    ours = (await shell.asked(recipe("PAUSE_MODE_WAIT")))["lease"]["lease_id"]
    found = (await shell.run(recipe("GetStatus | grep", "lease_"))).stdout
    assert '"holder": "somebody"' in found and theirs in found and ours in found
    told = await shell.asked(recipe("Resume", "$LEASE"), LEASE=theirs)
    assert [each["lease_id"] for each in told["state"]["pauses"]] == [ours]
    assert (await shell.asked(recipe("Resume", "force")))["state"]["phase"] == "PHASE_RUNNING"


async def test_a_request_is_ended(shell: Shell, client: AsyncClient) -> None:
    """Of so many sequences that it does not end while the shell and the program start."""
    options: Any = {"n": 64, "max_tokens": 2000, "ignore_eos": True}
    async with client.stream([1, 2, 3], request_id="by-hand", **options) as stream:
        await anext(stream)
        assert (await shell.asked(recipe("Abort"), REQUEST="by-hand"))["aborted_ids"] == ["by-hand"]
        outputs = [output async for delta in stream for output in delta.message.outputs]
    assert outputs[-1].finish.reason == generation_pb2.FINISH_REASON_ABORTED


async def test_a_tensor_is_pushed_by_hand(
    shell: Shell, client: AsyncClient, checkpoints: dict[str, Path], restored: None
) -> None:
    """That one, and nothing else."""
    await client.push_weights(checkpoints["b"], version=await next_version(client))
    version = await next_version(client)
    found = (await shell.run(recipe("GetWeights"))).stdout
    assert '"model.norm.weight"' in found and '"BF16"' in found
    assert re.search(rf'eight_?[vV]ersion": {version - 1}\b', found)
    told = await shell.asked(recipe("python -"), VERSION=version)
    assert (told["applied"]["previous_version"], told["applied"]["active_version"]) == (version - 1, version)
    served, before = (await client.pull_weights()).state_dict(), load_tensors(checkpoints["b"])
    assert torch.equal(served.pop("model.norm.weight"), torch.ones(128, dtype=torch.bfloat16))
    assert not torch.equal(before.pop("model.norm.weight"), torch.ones(128, dtype=torch.bfloat16))
    assert served.keys() == before.keys() and all(torch.equal(served[name], before[name]) for name in before)


async def test_a_push_is_staged_found_and_applied(
    shell: Shell, client: AsyncClient, checkpoints: dict[str, Path], restored: None
) -> None:
    version, push_id = await next_version(client), f"staged-{await next_version(client)}"
    given = {"PUSH": push_id, "VERSION": version, "CHECKPOINT": str(checkpoints["b"])}
    assert (await shell.asked(recipe("PUSH_ACTION_STAGE", "call"), **given))["push"]["state"] == "PUSH_STATE_STAGED"
    assert f'": "{push_id}"' in (await shell.run(recipe("GetStatus | grep", "push_"))).stdout
    assert (await shell.asked(recipe("GetPush"), PUSH=push_id))["push"]["missing"] == []
    assert (await shell.asked(recipe("CommitPush"), PUSH=push_id))["applied"]["active_version"] == version


async def test_a_push_is_given_up(shell: Shell, client: AsyncClient, checkpoints: dict[str, Path]) -> None:
    push_id = f"given-up-{shell.call.count('buf')}"
    version = await next_version(client)
    await client.push_weights(checkpoints["b"], version=version, push_id=push_id, action="stage")
    await shell.asked(recipe("DiscardPush"), PUSH=push_id)
    with pytest.raises(PushNotFoundError):
        await client.get_push(push_id)
    assert await next_version(client) == version


async def test_the_last_version_is_rolled_back_to(
    shell: Shell, client: AsyncClient, checkpoints: dict[str, Path], restored: None
) -> None:
    """Under a new number."""
    await client.push_weights(checkpoints["b"], version=await next_version(client))
    version = await next_version(client)
    told = await shell.asked(
        recipe('{"weight_version": $VERSION, "checkpoint_path"'), VERSION=version, CHECKPOINT=str(checkpoints["a"])
    )
    assert told["applied"]["active_version"] == version
    served, before = (await client.pull_weights()).state_dict(), load_tensors(checkpoints["a"])
    assert served.keys() == before.keys() and all(torch.equal(served[name], before[name]) for name in before)


@pytest.mark.parametrize("program", CALLS)
async def test_a_replica_is_drained_and_comes_back(
    program: str, daemon: DaemonProcess, router: RouterProcess, tmp_path: Path
) -> None:
    shell = Shell(CALLS[program], router.address, tmp_path)
    async with AsyncClient(router.address) as fleet:
        await fleet.wait_ready(60)
        drained = await shell.asked(recipe("DrainReplica"), REPLICA=daemon.address)
        assert drained["replica"]["address"] == daemon.address
        assert (await fleet.list_replicas()).replicas == []
        added = await shell.asked(recipe("AddReplica"), REPLICA=daemon.address)
        assert added["replica"]["address"] == daemon.address
        async with asyncio.timeout(60):
            await fleet.wait_ready(60)


@pytest.mark.parametrize("program", CALLS)
async def test_a_server_is_shut_down(program: str, tmp_path: Path) -> None:
    """A router here, which has no engine to start; tests/engine/test_service_manager.py shuts down a daemon."""
    process = RouterProcess(["--port", "0"], tmp_path / "stderr")
    try:
        shell = Shell(CALLS[program], process.address, tmp_path)
        told = await shell.asked(recipe("ControlService/Drain"))
        assert told["state"]["phase"] == "PHASE_DRAINING"
        assert await asyncio.to_thread(process.process.wait, 60) == 0
    finally:
        process.kill()


def test_every_recipe_is_run() -> None:
    """By a test that chooses it by words of it."""
    assert PAGE.read_text().count("```sh") == len(BLOCKS)
    run = {text for name in ("test_cookbook.py", "test_secured.py") for text in definitions(name).values()}
    for node in ast.walk(ast.parse(Path(__file__).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "recipe":
            words = [each.value for each in node.args if isinstance(each, ast.Constant)]
            run |= {recipe(*map(str, words))} if words else set()  # this one names none
    assert {text for _, text in BLOCKS} == run
