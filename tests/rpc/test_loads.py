"""Daemons that fetch weights themselves: from files, and from each other over real sockets."""

import asyncio
import gc
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from genserve.errors import (
    InvalidFieldError,
    ManifestMismatchError,
    PeersFailedError,
    PushConflictError,
    VersionNotNewerError,
    WeightVersionMismatchError,
)
from genserve.rpc.frames import peer as peer_module
from genserve.tensors.safetensors import StoredTensor, write_safetensors
from genserve.v1 import weights_pb2
from tests.rpc.conftest import Start
from tests.support.patience import STEP_S, until
from tests.support.pulled_peers import (
    MIB,
    TOTAL_BYTES,
    LyingPeer,
    content,
    data_of,
    listening,
    sending,
    until_received,
    weights,
)
from tests.support.refusals import refuses


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with version 3."""
    write_safetensors(tmp_path / "model.safetensors", weights(3).values())
    return tmp_path


async def test_a_daemon_loads_a_checkpoint_of_its_host(daemons: Start, checkpoint: Path) -> None:
    """A directory or a file, and a repeat answers the same."""
    daemon, client = await daemons()
    result = await client.load_weights(checkpoint, version=3, push_id="p")
    assert (result.push.state, result.push.push_id, daemon.engine.live) == ("applied", "p", content(3))
    assert result.applied is not None and result.applied.active_version == 3
    again = await client.load_weights(checkpoint, version=3, push_id="p")
    assert again.applied is not None and again.applied.active_version == 3
    file = await client.load_weights(checkpoint / "model.safetensors", version=4)
    assert file.state.weight_version == 4
    assert (await client.get_weights()).push_id == file.push.push_id


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"checkpoint_path": "model", "version": 3}, "checkpoint_path"),
        ({"checkpoint_path": "/does/not/exist", "version": 3}, "checkpoint_path"),
        ({"checkpoint_path": "/proc/self/mem", "version": 3}, "checkpoint_path"),
        ({"checkpoint_path": "/dev/zero", "version": 3}, "checkpoint_path"),
        ({"checkpoint_path": "/tmp\0", "version": 3}, "checkpoint_path"),
        ({"checkpoint_path": "/" + 300 * "x", "version": 3}, "checkpoint_path"),
        ({"checkpoint_path": 3000 * "/x", "version": 3}, "checkpoint_path"),
        ({"peers": [""], "version": 3}, "peers.addresses[0]"),
        ({"peers": ["127.0.0.1:1", "x" * 257]}, "peers.addresses[1]"),
        ({"peers": ["127.0.0.1:1"] * 65}, "peers.addresses"),
        ({"peers": ["127.0.0.1:1"], "peer_push_id": "\n"}, "peers.push_id"),
        ({"peers": ["127.0.0.1:1"], "push_id": "\n"}, "push_id"),
        ({}, "checkpoint_path"),
        ({"checkpoint_path": "/c", "previous": True}, "checkpoint_path"),
        ({"peers": ["127.0.0.1:1"], "previous": True}, "checkpoint_path"),
        ({"previous": 1}, "previous"),
    ],
)
async def test_a_source_that_cannot_be_is_named(daemons: Start, fields: dict[str, Any], named: str) -> None:
    """Before anything is staged."""
    daemon, client = await daemons()
    with pytest.raises(InvalidFieldError) as caught:
        await client.load_weights(**fields, timeout_s=20)
    assert [violation.field for violation in caught.value.violations] == [named]
    assert not daemon.registry.live


async def test_fields_are_named_as_in_the_request(daemons: Start, checkpoint: Path) -> None:
    """And not as in the header of a push."""
    _, client = await daemons()
    with pytest.raises(InvalidFieldError) as caught:
        await client.load_weights(checkpoint)
    assert [violation.field for violation in caught.value.violations] == ["weight_version"]
    await client.load_weights(checkpoint, version=3)
    with pytest.raises(VersionNotNewerError):
        await client.load_weights(checkpoint, version=3)


async def test_a_checkpoint_with_other_tensors_is_refused(daemons: Start, tmp_path: Path) -> None:
    """Its tensors are named, as those of a push are."""
    daemon, client = await daemons()
    only_a = weights(1)["a"]
    write_safetensors(tmp_path / "model.safetensors", [only_a, StoredTensor("c", "U8", (1,), memoryview(b"c"))])
    with refuses(ManifestMismatchError) as refused:
        await client.load_weights(tmp_path, version=1)
    assert 'header.manifest.tensors["c"]' in [each.field for each in refused.value.violations]
    assert not daemon.registry.live


@pytest.mark.parametrize(
    "shard", ["\0.safetensors", "\ud800.safetensors", "../a.safetensors", "x" * 300 + ".safetensors"]
)
async def test_files_that_cannot_be_are_the_fault_of_their_index(daemons: Start, tmp_path: Path, shard: str) -> None:
    """They are not the daemon's; and nothing stays open."""
    _, client = await daemons()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    (tmp_path / "other.safetensors").write_bytes(b"")
    with refuses(InvalidFieldError, field="checkpoint_path"):
        await client.load_weights(tmp_path, version=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    gc.disable()
    try:
        with pytest.raises(InvalidFieldError):
            await client.load_weights(tmp_path, version=3)
        # The call's error is dropped a moment after its answer.
        await until(lambda: not any(str(tmp_path) in opened for opened in open_files()))
    finally:
        gc.enable()


def open_files() -> Iterator[str]:
    """What this process has open."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the directory's own
            yield os.readlink(f"/proc/self/fd/{descriptor}")


async def test_files_that_change_while_they_are_read_are_noticed(
    daemons: Start, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of them is applied; the whole of the new ones is, under another id."""
    daemon, client = await daemons()
    monkeypatch.setattr("genserve.weights.load.checkpoint_source.AT_ONCE_BYTES", MIB)
    path = checkpoint / "model.safetensors"
    read = os.preadv
    num_reads = 0

    def preadv(fd: int, buffers: Any, position: int) -> int:
        nonlocal num_reads
        num_reads += os.readlink(f"/proc/self/fd/{fd}") == str(path)
        if num_reads == 6:  # after the header
            os.utime(path, ns=(1, 1))
        return read(fd, buffers, position)

    monkeypatch.setattr(os, "preadv", preadv)
    with refuses(InvalidFieldError, field="checkpoint_path", says=str(path)):
        await client.load_weights(checkpoint, version=3, push_id="p")
    assert (daemon.engine.live, num_reads >= 6) == ({}, True)
    assert 0 < daemon.registry.report("p").push.received_bytes < TOTAL_BYTES
    write_safetensors(path, weights(4).values())
    with pytest.raises(PushConflictError):  # what the first attempt has brought is compared
        await client.load_weights(checkpoint, version=3, push_id="p")
    result = await client.load_weights(checkpoint, version=3)
    assert (result.push.state, daemon.engine.live) == ("applied", content(4))


async def test_a_late_replica_gets_what_its_peer_serves(daemons: Start) -> None:
    """With the version that it has there, and the push that brought it."""
    first_daemon, first = await daemons()
    late_daemon, late = await daemons()
    pushed = await first.push_weights(weights(7), version=7)
    with pytest.raises(WeightVersionMismatchError):
        await first.pull_weights(version=6)
    result = await late.load_weights(peers=[first_daemon.address])
    assert (result.state.weight_version, late_daemon.engine.live) == (7, content(7))
    with refuses(PeersFailedError, says="not 8"):
        await late.load_weights(peers=[first_daemon.address], version=8)
    assert (await late.load_weights(peers=[first_daemon.address], force=True, action="stage")).push.state == "staged"
    assert (await first.get_weights()).push_id == pushed.push.push_id


async def test_a_push_passes_through_daemons_while_it_arrives(daemons: Start) -> None:
    """The last one of a chain has the first bytes before the trainer has sent the last ones, and nobody applies them
    before the trainer has sent its end frame."""
    first, client = await daemons()
    chain = [await daemons() for _ in range(2)]
    targets = [first.address, chain[0][0].address]
    loads = []
    async with sending(first.address, 1, "p") as push:
        push.send(MIB, 3 * MIB)
        await until_received(client, "p", 2 * MIB)
        for target, (_, each) in zip(targets, chain, strict=True):
            load = each.load_weights(peers=[target], peer_push_id="p", push_id="p")
            loads.append(asyncio.create_task(load))
            await until_received(each, "p", 2 * MIB)
        push.send(0, MIB)
        push.send(3 * MIB, TOTAL_BYTES)
        await until_received(chain[1][1], "p", TOTAL_BYTES)
        assert [(await each.get_push("p")).push.state for _, each in chain] == ["receiving"] * 2
        assert [daemon.engine.live for daemon, _ in chain] == [{}, {}]
        await push.end()
    assert [result.state.weight_version for result in await asyncio.gather(*loads)] == [1, 1]
    assert [daemon.engine.live for daemon, _ in chain] == [content(1)] * 2


async def test_peers_do_not_apply_a_push_that_never_ends(daemons: Start) -> None:
    """Its trainer is gone after the last byte: no peer says that it is complete."""
    first, client = await daemons()
    late_daemon, late = await daemons()
    async with sending(first.address, 1, "p") as push:
        push.send(0, TOTAL_BYTES)
        await until_received(client, "p", TOTAL_BYTES)
        load = asyncio.create_task(late.load_weights(peers=[first.address], peer_push_id="p", push_id="p"))
        await until_received(late, "p", TOTAL_BYTES)
    await until(lambda: not first.registry.live.find("p").num_attached)
    await client.discard_push("p", force=True)
    with refuses(PeersFailedError, says="NOT_FOUND"):
        await load
    assert late_daemon.engine.live == {}
    assert (await late.get_push("p")).push.state == "receiving"


async def test_another_peer_goes_on_where_one_has_stopped(daemons: Start) -> None:
    """With the bytes that are missing and no others, if both have the same push."""
    daemon, client = await daemons()
    gone, there = LyingPeer(data_of(1), "p", breaks_after=2 * MIB), LyingPeer(data_of(1), "p")
    async with listening(gone) as one, listening(there) as two:
        result = await client.load_weights(peers=[one, two])
    assert (result.push.state, daemon.engine.live) == ("applied", content(1))
    assert (gone.asked, there.asked) == ([[]], [[(2 * MIB, TOTAL_BYTES)]])


async def test_another_peer_sends_all_if_nothing_says_that_it_has_the_same(daemons: Start) -> None:
    """Bytes of two versions must not be mixed."""
    daemon, client = await daemons()
    gone = LyingPeer(data_of(1), "p", breaks_after=2 * MIB, breaks_again_after=0)
    there = LyingPeer(data_of(1), "q")
    async with listening(gone) as one, listening(there) as two:
        await client.load_weights(peers=[one, two])
    assert daemon.engine.live == content(1)
    assert there.asked[-1] == []
    gone = LyingPeer(data_of(1), "p", breaks_after=2 * MIB, breaks_again_after=0)
    async with listening(gone) as one, listening(LyingPeer(data_of(2), "q")) as two:
        with pytest.raises(PushConflictError):
            await client.load_weights(peers=[one, two], force=True)
    assert daemon.engine.live == content(1)


async def test_a_peer_that_stalls_is_left(daemons: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that it has for each frame."""
    monkeypatch.setattr(peer_module, "STALL_TIMEOUT_S", 2.0)
    daemon, client = await daemons()
    stalled, there = LyingPeer(data_of(1), "p", breaks_after=MIB, stalls=True), LyingPeer(data_of(1), "p")
    async with listening(stalled) as one, listening(there) as two:
        await client.load_weights(peers=[one, two])
    assert daemon.engine.live == content(1)
    assert there.asked == [[(MIB, TOTAL_BYTES)]]


async def test_when_no_peer_has_it_each_is_named(daemons: Start) -> None:
    """Within seconds, and nothing is staged."""
    daemon, client = await daemons()
    empty, _ = await daemons()
    with pytest.raises(PeersFailedError) as caught:
        await client.load_weights(peers=["127.0.0.1:1", empty.address], version=1, timeout_s=60)
    assert "127.0.0.1:1: it answered UNAVAILABLE" in caught.value.message
    assert f"{empty.address}: it answered FAILED_PRECONDITION" in caught.value.message
    assert not daemon.registry.live


async def test_a_load_that_was_cancelled_continues(daemons: Start) -> None:
    """Under its id, with what is missing."""
    daemon, client = await daemons()
    peer = LyingPeer(data_of(1), "p", breaks_after=3 * MIB, stalls=True)
    async with listening(peer) as address:
        load = asyncio.create_task(client.load_weights(peers=[address], push_id="mine"))
        await until_received(client, "mine", 3 * MIB)
        load.cancel()
        await asyncio.wait([load])
    whole = LyingPeer(data_of(1), "p")
    async with listening(whole) as address:
        async with asyncio.timeout(STEP_S):
            result = await client.load_weights(peers=[address], push_id="mine")
    assert (result.push.state, daemon.engine.live) == ("applied", content(1))
    assert whole.asked == [[(3 * MIB, TOTAL_BYTES)]]


async def test_a_pull_of_a_push_that_is_applied_meanwhile_goes_on(daemons: Start) -> None:
    """Its bytes are those of the served version then; when another one is served, the pull ends with an error."""
    first, client = await daemons()
    await client.push_weights(weights(1), version=1, push_id="p", action="stage")
    pull = first.weights.PullWeights(weights_pb2.PullWeightsRequest(push_id="p", chunk_bytes=MIB))
    frames = aiter(pull)
    header = await anext(frames)
    assert header.header.push_id == "p"
    assert await client.commit_push("p")
    received = {frame.chunk.offset: frame.chunk.data async for frame in frames if frame.HasField("chunk")}
    assert b"".join(received[offset] for offset in sorted(received)) == data_of(1)


async def test_the_frames_of_a_peer_are_bounded(daemons: Start) -> None:
    """A header that is larger than any for this checkpoint is not read."""
    daemon, client = await daemons()

    class Flooding(LyingPeer):
        async def pull(self, request: weights_pb2.PullWeightsRequest, context: Any) -> AsyncIterator[bytes]:
            tensors = [weights_pb2.TensorSpec(name="t" * (1 << 20), dtype="U8", shape=[1], length=1)]
            header = weights_pb2.PushHeader(weight_version=1, manifest=weights_pb2.Manifest(tensors=tensors))
            yield weights_pb2.PullWeightsResponse(header=header).SerializeToString()

    async with listening(Flooding(b"", "p")) as address:
        with refuses(PeersFailedError, says="no manifest"):
            await client.load_weights(peers=[address], timeout_s=60)
    assert not daemon.registry.live
