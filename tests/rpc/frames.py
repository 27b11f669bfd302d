"""The frames of a push, and what the daemon answers to them."""

import hashlib
from collections.abc import Iterable
from typing import Any

import google_crc32c
import grpc
import pytest

from genserve.v1 import weights_pb2
from tests.support.answers import answer_of
from tests.support.scripted_daemon import Daemon

DATA = hashlib.sha256(b"1").digest()
Frame = weights_pb2.PushWeightsRequest
END = Frame(end=weights_pb2.PushEnd())


async def header(daemon: Daemon, **fields: Any) -> Frame:
    """A header with the manifest that GetWeights tells."""
    manifest = (await daemon.weights.GetWeights(weights_pb2.GetWeightsRequest())).manifest
    return Frame(
        header=weights_pb2.PushHeader(**{"push_id": "p1", "weight_version": 1, "manifest": manifest, **fields})
    )


def chunk(start: int, end: int, **fields: Any) -> Frame:
    """Bytes [start, end) of DATA."""
    data = DATA[start:end]
    return Frame(
        chunk=weights_pb2.PushChunk(**{"offset": start, "data": data, "crc32c": google_crc32c.value(data), **fields})
    )


async def push(daemon: Daemon, frames: Iterable[Frame]) -> weights_pb2.PushWeightsResponse:
    """All frames over one stream."""
    return await answer_of(daemon.weights.PushWeights(iter(frames), timeout=30))


async def refused(daemon: Daemon, frames: Iterable[Frame]) -> grpc.aio.AioRpcError:
    """The error with which a push ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await push(daemon, frames)
    return caught.value
