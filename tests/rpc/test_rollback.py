"""The version before, which a daemon with --keep-committed has on its disk."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from genserve.errors import (
    NotResidentError,
    UnsupportedError,
    VersionNotNewerError,
    WeightVersionMismatchError,
)
from genserve.settings.config import ServeConfig
from genserve.weights.checkpoint.space import CheckpointSpace
from tests.rpc.served import weights
from tests.support.patience import STEP_S, until
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon, serving


@pytest.fixture
async def keeping(tmp_path: Path) -> AsyncIterator[tuple[Daemon, AsyncClient]]:
    """A daemon that keeps what is pushed, and its client."""
    (files := tmp_path / "model").mkdir()
    (files / "config.json").write_text("{}")
    config = ServeConfig(port=0, keep_committed=str(tmp_path / "kept"))
    async with AsyncExitStack() as stack:
        daemon = await stack.enter_async_context(serving(config, files=files))
        yield daemon, await stack.enter_async_context(AsyncClient(daemon.address))


async def kept(daemon: Daemon) -> None:
    """Returns when the served version is on the disk."""
    assert daemon.parts.keeper is not None
    await daemon.parts.keeper.close()


def live(version: int) -> dict[str, bytes]:
    """What the engine holds then."""
    return {name: bytes(tensor.data) for name, tensor in weights(version).items()}


async def test_a_rollback_serves_the_version_before_and_another_one_undoes_it(
    keeping: tuple[Daemon, AsyncClient],
) -> None:
    """As a push of its own, with the number and the digest of the version."""
    daemon, client = keeping
    pushed = []
    for version in (1, 2):
        pushed.append(await client.push_weights(weights(version), version=version))
        await kept(daemon)
    for version in (1, 2, 1):
        result = await client.load_weights(previous=True, force=True)
        assert (result.push.state, result.state.weight_version) == ("applied", version)
        assert daemon.engine.live == live(version)
        served = await client.get_weights()
        assert served.push_id == result.push.push_id not in {each.push.push_id for each in pushed}
        assert served.content_digest == result.push.content_digest != ""
        await kept(daemon)


async def test_a_version_that_is_not_kept_yet_is_rolled_back_to_the_one_that_is(
    keeping: tuple[Daemon, AsyncClient], tmp_path: Path
) -> None:
    """The disk is full."""
    daemon, client = keeping
    await client.push_weights(weights(1), version=1)
    await kept(daemon)
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model").rmdir()  # nothing can be written without it
    await client.push_weights(weights(2), version=2)
    await kept(daemon)
    result = await client.load_weights(previous=True, force=True)
    assert (result.state.weight_version, daemon.engine.live) == (1, live(1))


async def test_a_repeat_of_a_rollback_is_no_second_one(keeping: tuple[Daemon, AsyncClient]) -> None:
    """Under its push_id it gets the first answer."""
    daemon, client = keeping
    for version in (1, 2):
        await client.push_weights(weights(version), version=version)
        await kept(daemon)
    for _ in range(2):
        result = await client.load_weights(previous=True, force=True, push_id="back")
        assert (result.push.state, result.state.weight_version) == ("applied", 1)
        await kept(daemon)


async def test_what_cannot_be_rolled_back_to_is_reported(keeping: tuple[Daemon, AsyncClient], tmp_path: Path) -> None:
    """No version before, one that cannot be read, or another one; and its number is as that of any push."""
    daemon, client = keeping
    with refuses(NotResidentError, says="no version before"):
        await client.load_weights(previous=True, force=True)
    await client.push_weights(weights(1), version=1)
    await kept(daemon)
    with refuses(NotResidentError, says="no version before"):
        await client.load_weights(previous=True, force=True)
    await client.push_weights(weights(2), version=2)
    await kept(daemon)
    record = tmp_path / "kept" / "previous" / "genserve.json"
    record.rename(tmp_path / "away")
    with refuses(NotResidentError, says=f"move {record.parent} away"):
        await client.load_weights(previous=True, force=True)
    (tmp_path / "away").rename(record)
    with refuses(WeightVersionMismatchError, says="is 1, not 3"):
        await client.load_weights(previous=True, version=3, force=True)
    with refuses(VersionNotNewerError):
        await client.load_weights(previous=True)
    assert daemon.engine.live == live(2)


async def test_a_push_that_is_committed_meanwhile_is_not_rolled_back(
    keeping: tuple[Daemon, AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollback still reads its files then, and the version before the served one is another one."""
    daemon, client = keeping
    for version in (1, 2):
        await client.push_weights(weights(version), version=version)
        await kept(daemon)
    await client.push_weights(weights(3), version=3, action="stage", push_id="p")
    reading, go_on, read_into = threading.Event(), threading.Event(), CheckpointSpace.read_into

    def slowly(space: CheckpointSpace, start: int, target: memoryview) -> None:
        reading.set()
        go_on.wait(STEP_S)
        read_into(space, start, target)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointSpace, "read_into", slowly)
        back = asyncio.create_task(client.load_weights(previous=True, force=True))
        await until(reading.is_set)
    await client.commit_push("p")
    go_on.set()
    with refuses(WeightVersionMismatchError, says="version 3 is served, not 2"):
        await back
    assert daemon.engine.live == live(3)


async def test_a_daemon_that_keeps_nothing_has_no_version_before(daemon: Daemon) -> None:
    """The flag is named."""
    async with AsyncClient(daemon.address) as client:
        await client.push_weights(weights(1), version=1)
        with refuses(UnsupportedError, says="--keep-committed"):
            await client.load_weights(previous=True, force=True)
