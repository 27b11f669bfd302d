"""Daemons that load from peers which send garbage, or something else than they did: over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import pytest

from genserve.client import AsyncClient
from genserve.errors import (
    InvalidFieldError,
    PeersFailedError,
    PushConflictError,
    PushNotFoundError,
    WeightVersionMismatchError,
)
from genserve.rpc.frames import peer as peer_module
from genserve.tensors.chunk_frame import chunk_frame
from genserve.v1 import weights_pb2
from genserve.weights.load import loader as loader_module
from genserve.wire.conversions import manifest_message
from tests.rpc.conftest import Start
from tests.support.paced_push import PacedPush
from tests.support.patience import STEP_S
from tests.support.pulled_peers import (
    CHECKPOINT,
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
from tests.support.scripted_daemon import Daemon

HEADER = weights_pb2.PushHeader(weight_version=1, manifest=manifest_message(CHECKPOINT.as_manifest()))
HEADER_FRAME = weights_pb2.PullWeightsResponse(header=HEADER).SerializeToString()
END_FRAME = weights_pb2.PullWeightsResponse(end=weights_pb2.PushEnd()).SerializeToString()
CHUNK_FRAME = chunk_frame(0, [b"x"], None)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(loader_module, "MAX_DELAY_S", 0.01)


class SendingPeer(LyingPeer):
    """Sends these frames, and then keeps sending the last one if it `repeats`."""

    def __init__(self, *frames: bytes, repeats: bool = False) -> None:
        super().__init__(b"", "p")
        self._frames = frames
        self._repeats = repeats

    async def pull(self, request: weights_pb2.PullWeightsRequest, context: Any) -> AsyncIterator[bytes]:
        for frame in self._frames:
            yield frame
        while self._repeats:
            await asyncio.sleep(0.001)
            yield self._frames[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "frames",
    [
        [b"\xff" * 100],
        [HEADER_FRAME, b"\xff" * 100],
        [HEADER_FRAME, b"\x12\x7f"],
        [HEADER_FRAME, b""],
        [b""],
        [],
        [END_FRAME],
        [CHUNK_FRAME],
        [HEADER_FRAME],
        [HEADER_FRAME, HEADER_FRAME],
        [HEADER_FRAME, END_FRAME],
        [HEADER_FRAME, END_FRAME, CHUNK_FRAME],
        [HEADER_FRAME, chunk_frame(0, [b"x"], 7)],
        [HEADER_FRAME, chunk_frame(TOTAL_BYTES, [b"x"], None)],
        [HEADER_FRAME, chunk_frame((1 << 64) - 1, [b"x"], None)],
        [HEADER_FRAME, weights_pb2.PushWeightsRequest(segment=weights_pb2.PushSegment(path="/x")).SerializeToString()],
        [weights_pb2.PullWeightsResponse(header=weights_pb2.PushHeader()).SerializeToString()],
        [b"\x12" + b"\xff" * 9 + b"\x01"],
    ],
)
async def test_whatever_a_peer_sends_the_next_one_is_asked(daemons: Start, frames: list[bytes]) -> None:
    """And it is the peer whose fault it is, not the caller's."""
    daemon, client = await daemons()
    async with listening(SendingPeer(*frames)) as wrong, listening(LyingPeer(data_of(1), "p")) as right:
        with pytest.raises((PeersFailedError, InvalidFieldError)) as caught:
            await client.load_weights(peers=[wrong], version=1, timeout_s=60)
        if isinstance(caught.value, InvalidFieldError):
            assert caught.value.violations[0].field == "weight_version"  # what it says that it has
        async with asyncio.timeout(STEP_S):
            await client.load_weights(peers=[wrong, right], push_id="p1")
    assert daemon.engine.live == content(1)


async def test_frames_of_a_peer_that_are_too_large_are_not_held(daemons: Start) -> None:
    """gRPC refuses them as they come."""
    _, client = await daemons()
    async with listening(SendingPeer(HEADER_FRAME, bytes(65 * MIB))) as address:
        with refuses(PeersFailedError, says="RESOURCE_EXHAUSTED"):
            await client.load_weights(peers=[address], timeout_s=60)


@pytest.mark.parametrize("frame", [chunk_frame(0, [b""], None), CHUNK_FRAME])
async def test_a_peer_that_sends_nothing_new_ends_with_the_time_to_live(daemons: Start, frame: bytes) -> None:
    """It is never silent, but nothing comes of it."""
    daemon, client = await daemons()
    async with listening(SendingPeer(HEADER_FRAME, frame, repeats=True)) as address, asyncio.timeout(STEP_S):
        with refuses(PushNotFoundError, says="'mine'"):
            await client.load_weights(peers=[address], staging_ttl_s=0.5, push_id="mine")
    assert not daemon.registry.live


async def interrupted(late: AsyncClient, first: Daemon, num_bytes: int, **fields: Any) -> None:
    """A load of push p of which so many bytes came."""
    load = asyncio.create_task(late.load_weights(peers=[first.address], push_id="p", **fields))
    await until_received(late, "p", num_bytes)
    load.cancel()
    await asyncio.wait([load])


@pytest.mark.slow
async def test_a_load_with_more_holes_than_a_peer_takes_ranges_goes_on(daemons: Start) -> None:
    """It asks for the last of them as one, and what it has of that is compared."""
    daemon, client = await daemons()
    peer = LyingPeer(data_of(1), "p")
    header = weights_pb2.PushHeader(attempt="origin of p", push_id="mine")
    header.MergeFrom(HEADER)
    async with PacedPush(daemon.address, header, data_of(1)) as push:
        for start in range(1, 4200 * 2, 2):
            push.send(start, start + 1)
        await until_received(client, "mine", 4200)
    async with listening(peer) as address:
        await client.load_weights(peers=[address], push_id="mine")
    assert daemon.engine.live == content(1)
    assert (len(peer.asked[0]), peer.asked[0][-1]) == (4096, (8190, TOTAL_BYTES))


async def test_bytes_of_another_push_under_the_same_id_are_not_mixed_in(daemons: Start) -> None:
    """The trainer's process died, and its next one sends the step again from another state: one half was here."""
    first, client = await daemons()
    late_daemon, late = await daemons()
    async with sending(first.address, 1, "p") as push:
        push.send(0, 2 * MIB)
        await until_received(client, "p", 2 * MIB)  # or the load would not find it
        await interrupted(late, first, 2 * MIB, peer_push_id="p")
    await client.discard_push("p", force=True)
    async with sending(first.address, 1, "p", content_of=2) as push:
        push.send(0, TOTAL_BYTES)
        await push.end()
    assert first.engine.live == content(2)
    with pytest.raises(PushConflictError):
        await late.load_weights(peers=[first.address], peer_push_id="p", push_id="p")
    assert late_daemon.engine.live == {}
    await late.load_weights(peers=[first.address], push_id="q")
    assert late_daemon.engine.live == content(2)


async def test_a_version_that_was_served_under_the_same_number_is_not_mixed_in(
    daemons: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that came under the same id again."""
    monkeypatch.setattr(peer_module, "STALL_TIMEOUT_S", 10.0)
    late_daemon, late = await daemons()
    old = LyingPeer(data_of(1), "p", breaks_after=2 * MIB, stalls=True)
    async with listening(old) as address:
        load = asyncio.create_task(late.load_weights(peers=[address], push_id="p"))
        await until_received(late, "p", 2 * MIB)
        load.cancel()
        await asyncio.wait([load])
    async with listening(LyingPeer(data_of(2), "p", origin="another")) as address:
        with pytest.raises(PushConflictError):
            await late.load_weights(peers=[address], push_id="p")
    assert late_daemon.engine.live == {}


async def test_a_relay_names_the_origin_of_what_it_passes_on(daemons: Start) -> None:
    """So that whoever loads from it can go on at the origin, before and after it is served."""
    first, client = await daemons()
    relay_daemon, relay = await daemons()
    await client.push_weights(weights(1), version=1, push_id="p", action="stage")
    names = [await _origin(first, "p")]
    await relay.load_weights(peers=[first.address], peer_push_id="p", push_id="other", action="stage")
    names.append(await _origin(relay_daemon, "other"))
    await client.commit_push("p")
    await relay.commit_push("other")
    names += [await _origin(each, "") for each in (first, relay_daemon)]
    assert len(set(names)) == 1 and names[0]


async def _origin(daemon: Daemon, push_id: str) -> str:
    async for frame in daemon.weights.PullWeights(weights_pb2.PullWeightsRequest(push_id=push_id)):
        return str(frame.header.attempt)
    raise AssertionError


async def test_broken_pull_does_not_resume_with_other_weights_of_its_version() -> None:
    """`force` allows the number of the served one."""

    for origin, is_other in (("p", False), ("another", True)):
        peer = LyingPeer(data_of(1), "p", breaks_after=2 * MIB, origin="p")

        def replaced(*_: int, peer: LyingPeer = peer, origin: str = origin) -> None:
            peer.origin = origin

        async with listening(peer) as address, AsyncClient(address) as client:
            with pytest.raises(WeightVersionMismatchError) if is_other else nullcontext():
                assert (await client.pull_weights(progress=replaced)).total_bytes == TOTAL_BYTES
        assert len(peer.asked) == 2
