"""The daemon's own limits, as a client on the wire meets them: times that it was not given, sizes, and pings."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

import pytest

from genserve.errors import QueueFullError
from genserve.rpc.watchers import Watchers
from genserve.v1 import control_pb2, weights_pb2
from tests.rpc.conftest import Daemon, field_of, reason_of
from tests.rpc.frames import header, refused

# HTTP/2: the client's preface with empty settings, and the header of a frame: length, type, flags, stream.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
FRAME_HEADER_BYTES = 9
SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1
MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 5, 6
MIN_HEADER_BYTES = 256 << 10


async def test_a_call_without_a_timeout_has_that_of_the_contract(daemon: Daemon) -> None:
    """A minute where requests wait for it, five where workers move weights."""
    daemon.engine.backend = "scripted"
    await daemon.control.ResetCache(control_pb2.ResetCacheRequest())
    await daemon.weights.GetWeights(weights_pb2.GetWeightsRequest(include_digests=True))
    await daemon.weights.InitWeightTransfer(weights_pb2.InitWeightTransferRequest(init_info="{}"))
    await daemon.weights.StartWeightUpdate(weights_pb2.StartWeightUpdateRequest())
    await daemon.weights.UpdateWeights(weights_pb2.UpdateWeightsRequest(update_info='{"a": "new"}'))
    await daemon.weights.FinishWeightUpdate(weights_pb2.FinishWeightUpdateRequest())
    given_s = daemon.engine.timeouts_s
    assert 55.0 < given_s["transfer_start"] < 60.0
    assert [given_s[step] for step in ("reset_prefix_cache", "weight_digests")] == [60.0, 300.0]
    assert [given_s[f"transfer_{call}"] for call in ("init", "update", "finish")] == [300.0] * 3


async def test_a_header_may_have_four_times_the_bytes_of_the_manifest_and_256_kib(daemon: Daemon) -> None:
    """One byte more is not parsed."""
    served = (await daemon.weights.GetWeights(weights_pb2.GetWeightsRequest())).manifest
    limit_bytes = MIN_HEADER_BYTES + 4 * served.ByteSize()
    frame = await header(daemon, push_id="x" * MIN_HEADER_BYTES)
    frame.header.push_id = "x" * (MIN_HEADER_BYTES + limit_bytes - frame.ByteSize())
    assert frame.ByteSize() == limit_bytes
    assert field_of(await refused(daemon, [frame])) == "header.push_id"
    frame.header.push_id += "x"
    error = await refused(daemon, [frame])
    assert reason_of(error) == "MANIFEST_MISMATCH"
    assert f"the header has {limit_bytes + 1} bytes" in (error.details() or "")
    assert f"more than {limit_bytes}" in (error.details() or "")


@asynccontextmanager
async def connected(daemon: Daemon) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that speaks HTTP/2 and nothing else."""
    host, port = daemon.address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE)
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.close()


async def frame_of(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """The next one: its type, its flags and what it carries."""
    head = await reader.readexactly(FRAME_HEADER_BYTES)
    return head[3], head[4], await reader.readexactly(int.from_bytes(head[:3], "big"))


async def test_what_a_client_may_send_at_once_is_told_when_it_connects(daemon: Daemon) -> None:
    """4 MiB in a frame, so that a chunk of a push is one; 16 KiB of metadata."""
    async with connected(daemon) as (reader, _):
        kind, _, payload = await frame_of(reader)
    assert kind == SETTINGS
    told = dict(struct.iter_unpack(">HI", payload))
    assert (told[MAX_FRAME_SIZE], told[MAX_HEADER_LIST_SIZE]) == (4 << 20, 16 << 10)


async def test_a_client_may_ping_as_often_as_it_likes(daemon: Daemon) -> None:
    """Also one that has no call: its connection stays, and each ping is answered."""
    async with connected(daemon) as (reader, writer):
        for number in range(20):
            writer.write(struct.pack(">I", 8)[1:] + bytes([PING, 0, 0, 0, 0, 0]) + struct.pack(">Q", number))
            while (answer := await frame_of(reader))[:2] != (PING, ACK):
                assert answer[0] != GOAWAY
            assert answer[2] == struct.pack(">Q", number)


def test_1024_streams_may_watch_one_thing() -> None:
    """Each wakes up at every change: there is an end, and whoever meets it may come again in a second."""
    with ExitStack() as joined:
        watchers = Watchers("health")
        for _ in range(1024):
            joined.enter_context(watchers.joined())
        with pytest.raises(QueueFullError, match="1024 streams watch health") as full:
            joined.enter_context(watchers.joined())
    assert full.value.retry_after_s == 1.0
