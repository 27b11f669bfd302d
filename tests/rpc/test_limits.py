"""The daemon's own limits, as a client on the wire meets them: times that it was not given, sizes, and pings."""

import asyncio
import struct

import pytest

from genserve.v1 import control_pb2, generation_pb2, weights_pb2
from tests.rpc.frames import header, refused
from tests.support.http2 import ACK, GOAWAY, PING, SETTINGS, connected, frame_bytes, frame_of
from tests.support.scripted_daemon import Daemon, field_of, reason_of

MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 5, 6
"""Settings of HTTP/2."""
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


async def test_header_limit_is_four_times_the_manifest_and_256_kib(daemon: Daemon) -> None:
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
    assert f" {limit_bytes + 1} bytes" in (error.details() or "")
    assert f" {limit_bytes}" in (error.details() or "")


async def test_what_a_client_may_send_at_once_is_told_when_it_connects(daemon: Daemon) -> None:
    """4 MiB in a frame, so that a chunk of a push is one; 16 KiB of metadata."""
    async with connected(daemon.address) as (reader, _):
        kind, _, payload = await frame_of(reader)
    assert kind == SETTINGS
    told = dict(struct.iter_unpack(">HI", payload))
    assert (told[MAX_FRAME_SIZE], told[MAX_HEADER_LIST_SIZE]) == (4 << 20, 16 << 10)


@pytest.mark.slow
async def test_calls_that_arrive_together_are_all_answered(daemon: Daemon) -> None:
    """Far more than are read at once: gRPC would cancel those beyond a thousand, at random and without a word."""

    async def ask() -> int:
        answer = await daemon.generation.Tokenize(generation_pb2.TokenizeRequest(text="x"), timeout=120)
        return len(answer.token_ids)

    assert await asyncio.gather(*(ask() for _ in range(4000))) == [2] * 4000


async def test_a_client_may_ping_as_often_as_it_likes(daemon: Daemon) -> None:
    """Also one that has no call: its connection stays, and each ping is answered."""
    async with connected(daemon.address) as (reader, writer):
        for number in range(20):
            writer.write(frame_bytes(PING, 0, struct.pack(">Q", number)))
            while (answer := await frame_of(reader))[:2] != (PING, ACK):
                assert answer[0] != GOAWAY
            assert answer[2] == struct.pack(">Q", number)
