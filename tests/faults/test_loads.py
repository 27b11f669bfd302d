"""Weights that daemons fetch from each other while some of them are killed: what is live was pushed, byte for byte."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from genserve.client import AsyncClient
from genserve.errors import PeersFailedError
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.faulty_worker import SLOW_RUN
from tests.support.labelled_streams import LiveStreams
from tests.support.paced_push import PacedPush
from tests.support.raw_push import RawPush
from tests.support.subject import Subject

LONG = pytest.mark.long("genserve/weights/load", "genserve/client/weights")


@contextmanager
def running(checkpoint: Path, directory: Path) -> Iterator[DaemonProcess]:
    """Another daemon on a checkpoint."""
    process = DaemonProcess(["--model", str(checkpoint), *SMALL_ENGINE], directory / uuid.uuid4().hex)
    try:
        yield process.wait_serving()
    finally:
        process.end()


@pytest.fixture(scope="module")
def first(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """The daemon that the trainer sends to."""
    with running(checkpoints["a"], tmp_path_factory.mktemp("first")) as process:
        yield process


async def test_a_late_replica_serves_what_its_peer_serves(
    first: DaemonProcess, subject: Subject, checkpoints: dict[str, Path]
) -> None:
    """Under the version that it has there, while requests run."""
    version = await subject.oracle.served_version() + 3
    async with AsyncClient(first.address) as peer:
        await peer.push_weights(checkpoints["b"], version=version, force=True)
    subject.oracle.committed[version] = "b"
    subject.order(SLOW_RUN)
    async with LiveStreams.running(subject.client, 1) as live:
        await live.gained(1)
        result = await subject.client.load_weights(peers=[first.address])
        assert result.state.weight_version == version
        await live.gained(5)  # one of the old version may be on its way
        (stream,) = await live.end()
    subject.release()
    assert stream.labels[0] < stream.labels[-1] == version
    await subject.oracle.holds((version, "b"))


@pytest.mark.parametrize("share", [0.5, *(pytest.param(each, marks=LONG) for each in (0.0, 0.99))])
async def test_a_relay_that_is_killed_is_replaced(
    first: DaemonProcess, subject: Subject, checkpoints: dict[str, Path], tmp_path: Path, share: float
) -> None:
    """By the next peer, which sends what is missing."""
    version = 100 + await subject.oracle.served_version()
    raw = RawPush(first.address, checkpoints["b"], version, uuid.uuid4().hex)
    raw.header.force, raw.header.attempt = True, "1"
    push_id, total_bytes = raw.header.push_id, len(raw.data)
    num_bytes = int(share * total_bytes)
    with running(checkpoints["a"], tmp_path) as relay:
        async with (
            PacedPush(first.address, raw.header, raw.data) as push,
            AsyncClient(relay.address) as between,
        ):
            push.send(0, num_bytes)
            passing = between.load_weights(peers=[first.address], peer_push_id=push_id, push_id=push_id)
            passed = asyncio.create_task(passing)
            subject.oracle.committed[version] = "b"
            loading = subject.client.load_weights(
                peers=[relay.address, first.address], peer_push_id=push_id, push_id=push_id
            )
            loaded = asyncio.create_task(loading)
            await subject.until_push(push_id, received_bytes=num_bytes)
            relay.kill()
            push.send(num_bytes, total_bytes)
            await push.end()
            result = await loaded
            await asyncio.wait([passed])
    assert (result.state.weight_version, result.push.push_id) == (version, push_id)
    await subject.oracle.holds((version, "b"))


async def test_nothing_is_applied_of_a_push_whose_trainer_was_killed(
    first: DaemonProcess, subject: Subject, checkpoints: dict[str, Path]
) -> None:
    """Whoever has fetched a part of it keeps that until its time to live ends, and serves what it has served."""
    version = await subject.oracle.served_version()
    raw = RawPush(first.address, checkpoints["b"], 100 + version, uuid.uuid4().hex)
    raw.header.force, raw.header.attempt = True, "1"
    raw.header.staging_ttl.FromSeconds(3)
    push_id, total_bytes = raw.header.push_id, len(raw.data)
    async with PacedPush(first.address, raw.header, raw.data) as push:
        push.send(0, total_bytes)
        loading = subject.client.load_weights(peers=[first.address], peer_push_id=push_id, push_id=push_id)
        loaded = asyncio.create_task(loading)
        await subject.until_push(push_id, received_bytes=total_bytes)
    with pytest.raises(PeersFailedError):
        await loaded
    await subject.client.discard_push(push_id)
    await subject.oracle.holds((version, "a"))
