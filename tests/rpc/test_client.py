"""The Python client and its commands against the real server: pushes by several callers, staged ones, and pulls."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import genserve.rpc.weights as servicer_module
from genserve.cli import main
from genserve.client import AsyncClient, control
from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import (
    DeadlineError,
    InvalidFieldError,
    NotResidentError,
    PushConflictError,
    PushNotFoundError,
    PushTruncatedError,
    UnavailableError,
    WeightVersionMismatchError,
)
from tests.rpc.served import weights
from tests.support.clocks import advanced_clock
from tests.support.fault_proxy import FaultProxy, Way
from tests.support.patience import STEP_S, until
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[AsyncClient]:
    """A client of the server."""
    async with AsyncClient(daemon.address) as connected:
        yield connected


def live(version: int) -> dict[str, bytes]:
    """What the engine holds when it serves them."""
    return {name: bytes(tensor.data) for name, tensor in weights(version).items()}


@pytest.mark.parametrize("streams", [1, 2, 5, 40])
async def test_one_push_on_several_streams(daemon: Daemon, client: AsyncClient, streams: int) -> None:
    """Also on more streams than there are bytes."""
    sent: list[int] = []
    result = await client.push_weights(
        weights(1), version=1, streams=streams, chunk_bytes=3, progress=lambda p: sent.append(p.sent_bytes)
    )
    assert result.applied is not None and result.applied.active_version == 1
    assert daemon.engine.live == live(1)
    assert sorted(sent)[-1] == 32
    assert daemon.engine.calls.count("commit_weights 1") == 1


async def test_one_push_by_several_callers(daemon: Daemon, client: AsyncClient) -> None:
    """Each brings one of the tensors, and all get the outcome."""
    layout = await client.get_weights()
    results = await asyncio.gather(
        *(
            client.push_weights({name: tensor}, version=1, push_id="p", layout=layout, callers=2, streams=2)
            for name, tensor in weights(1).items()
        )
    )
    assert [r.applied is not None and r.applied.active_version for r in results] == [1, 1]
    assert daemon.engine.live == live(1)
    assert daemon.engine.calls.count("commit_weights 1") == 1


async def test_caller_whose_fellow_is_missing_waits_until_its_deadline(daemon: Daemon, client: AsyncClient) -> None:
    """Nothing is applied, and the error tells what did not come."""
    layout = await client.get_weights()
    only_a = {"a": weights(1)["a"]}
    for timeout_s in (0.5, 5.0, 25.0):  # a busy machine may take longer to bring its own bytes there
        with pytest.raises(DeadlineError) as caught:
            await client.push_weights(only_a, version=1, push_id="p", layout=layout, callers=2, timeout_s=timeout_s)
        if "16 bytes of b" in caught.value.message:
            break
    assert "nothing was applied" in caught.value.message and "16 bytes of b" in caught.value.message
    assert daemon.engine.weight_version == 0


async def test_callers_that_disagree_are_refused(daemon: Daemon, client: AsyncClient) -> None:
    """Two versions under one id; and several callers without an id."""
    layout = await client.get_weights()
    only_a, only_b = ({name: tensor} for name, tensor in weights(1).items())
    first = asyncio.create_task(client.push_weights(only_a, version=1, push_id="p", layout=layout, callers=2))
    await until(lambda: "p" in daemon.registry.live)
    with pytest.raises(PushConflictError):
        await client.push_weights(only_b, version=2, push_id="p", layout=layout, callers=2)
    await client.push_weights(only_b, version=1, push_id="p", layout=layout, callers=2)
    await first
    with refuses(InvalidFieldError, field="push_id"):
        await client.push_weights(only_a, version=2, layout=layout, callers=2)


async def test_staged_push_is_committed_or_discarded(daemon: Daemon, client: AsyncClient) -> None:
    """And an applied one can neither be discarded nor applied again."""
    for version in (1, 2):
        staged = await client.push_weights(weights(version), version=version, push_id=f"p{version}", action="stage")
        assert (staged.push.state, staged.applied) == ("staged", None)
    with pytest.raises(WeightVersionMismatchError):
        await client.commit_push("p2", expected_version=1)
    assert (await client.discard_push("p2")).received_bytes == 32
    first = await client.commit_push("p1", expected_version=0)
    assert first.applied is not None and first.applied.active_version == 1
    assert (await client.commit_push("p1")).applied == first.applied
    for unknown in ("p1", "p2", "never"):
        with pytest.raises(PushNotFoundError):
            await client.discard_push(unknown)


async def test_what_was_pulled_is_what_was_pushed(client: AsyncClient, tmp_path: Path) -> None:
    """As views, as numpy sees the file, and as another push."""
    with pytest.raises(NotResidentError):
        await client.pull_weights()
    await client.push_weights(weights(1), version=1)
    seen: list[tuple[int, int]] = []
    pulled = await client.pull_weights(version=1, chunk_bytes=5, progress=lambda *sizes: seen.append(sizes))
    assert pulled.weight_version == 1
    assert {name: bytes(tensor.data) for name, tensor in pulled.tensors.items()} == live(1)
    assert seen[-1] == (32, 32)
    pulled.save(tmp_path / "one.safetensors")
    assert load_file(tmp_path / "one.safetensors")["a"].numpy().tobytes() == live(1)["a"]
    assert os.listdir(tmp_path) == ["one.safetensors"]
    await client.push_weights(pulled.tensors, version=2)
    await client.push_weights(tmp_path / "one.safetensors", version=3)
    assert (await client.pull_weights()).tensors == pulled.tensors
    with pytest.raises(TypeError, match=r"pass its `\.tensors`, or its `\.state_dict\(\)`"):
        await client.push_weights(pulled, version=2)
    repeated = await client.push_weights(pulled.state_dict(), version=4)
    assert (repeated.state.weight_version, (await client.pull_weights()).tensors) == (4, pulled.tensors)
    assert pulled.state_dict()["b"].shape == (8,)
    with pytest.raises(WeightVersionMismatchError):
        await client.pull_weights(version=1)


async def test_pull_goes_on_where_it_broke(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same version: one that was replaced in between is refused rather than mixed."""
    await client.push_weights(weights(1), version=1)
    asked: list[tuple[int, int]] = []
    frames_of = servicer_module.pull_frames

    async def broken(request: Any, version: Any) -> AsyncIterator[Any]:
        asked.extend((each.start, each.end) for each in request.ranges)
        async for number, frame in _numbered(frames_of(request, version)):
            if number == 3 and not request.ranges:
                raise UnavailableError("the connection broke")
            yield frame

    monkeypatch.setattr(servicer_module, "pull_frames", broken)
    pulled = await client.pull_weights(chunk_bytes=8)
    assert {name: bytes(tensor.data) for name, tensor in pulled.tensors.items()} == live(1)
    assert asked == [(16, 32)]


async def _numbered(frames: AsyncIterator[Any]) -> AsyncIterator[tuple[int, Any]]:
    number = 0
    async for frame in frames:
        yield number, frame
        number += 1


async def test_pull_that_ends_early_is_no_pull(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the status says, the end frame has to come. It is asked for again until half a minute has passed."""
    await client.push_weights(weights(1), version=1)
    frames_of = servicer_module.pull_frames

    async def short(request: Any, version: Any) -> AsyncIterator[Any]:
        async for frame in frames_of(request, version):
            yield frame
            return  # after the header

    monkeypatch.setattr(servicer_module, "pull_frames", short)
    with advanced_clock() as clock:
        pulling = asyncio.create_task(client.pull_weights())
        await clock.advance_until(pulling.done, step_s=1.0)
    with pytest.raises(PushTruncatedError):
        await pulling


async def test_commands_stage_commit_discard_and_pull(
    daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What each prints is what the next one takes."""

    async def run(*arguments: str) -> tuple[int, str, str]:
        status = await asyncio.to_thread(main, [*arguments, "--target", daemon.address])
        output = capsys.readouterr()
        return status, output.out, output.err

    file = tmp_path / "in.safetensors"
    async with AsyncClient(daemon.address) as client:
        await client.push_weights(weights(1), version=1)
        (await client.pull_weights()).save(file)
    status, output, _ = await run("push", str(file), "--stage", "--streams", "2")
    assert status == 0
    *_, command = output.splitlines()
    assert re.fullmatch(rf"genserve commit \S+ --target {daemon.address}", command)
    status, output, _ = await run(*command.split()[1:])
    assert (status, "1 -> 2" in output) == (0, True)
    _, output, _ = await run("push", str(file), "--stage")
    *_, command = output.splitlines()
    status, output, _ = await run("discard", *command.split()[2:])
    assert (status, output) == (0, "version 3: 0.00 GB discarded\n")
    status, output, errors = await run("pull", str(tmp_path / "out.safetensors"))
    assert (status, output) == (0, f"version 2: 0.00 GB in {tmp_path / 'out.safetensors'}\n")
    assert "100%" in errors
    assert torch.equal(load_file(tmp_path / "out.safetensors")["b"], load_file(file)["b"])
    status, _, errors = await run("pull", str(tmp_path / "nowhere" / "out.safetensors"))
    assert (status, "no such directory" in errors) == (1, True)
    status, _, errors = await run("pull", str(tmp_path))
    assert (status, "is a directory" in errors) == (1, True)
    status, _, errors = await run("commit", "never")
    assert (status, errors.startswith("genserve: PUSH_NOT_FOUND: ")) == (1, True)


async def test_pause_cancelled_as_its_answer_arrives_leaves_no_lease(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease of somebody else stays."""
    monkeypatch.setattr(control, "GIVE_UP_S", STEP_S)
    theirs = await daemon.pauses.pause(PauseMode.KEEP, KvPolicy.REUSE, holder="other", ttl_s=60, timeout_s=5)
    async with FaultProxy(daemon.address) as proxy, AsyncClient(proxy.address) as client:
        await client.status()
        proxy.switch(Way.TO_CLIENT, delay_s=0.2)
        pausing = asyncio.create_task(client.pause(holder="cancelled"))
        await until(lambda: len(daemon.board.state().pauses) == 2)
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        assert [lease.lease_id for lease in daemon.board.state().pauses] == [theirs.lease_id]
