"""A trainer that stops in the middle of a push, to be killed there: run as a program.

    python -m tests.faults.trainer ADDRESS CHECKPOINT VERSION PUSH_ID PERCENT TTL_S

Sends that share of the bytes, says "sent N" on stdout, and waits for ever. At 100 it sends the end frame as well.
"""

import asyncio
import sys

import grpc.aio

from genserve.client.weights.layout import ByteSpace
from genserve.client.weights.sources import tensor_sources
from genserve.client.weights.upload import END_FRAME, chunk_frame, header_frame
from genserve.v1 import weights_pb2
from genserve.wire.conversions import manifest_message

CHUNK_BYTES = 16 << 10


async def push(address: str, checkpoint: str, version: int, push_id: str, percent: int, ttl_s: int) -> None:
    """Sends, tells and waits."""
    space = ByteSpace(tensor_sources(checkpoint))
    manifest = manifest_message(space.manifest(partial=False))
    header = weights_pb2.PushHeader(push_id=push_id, weight_version=version, manifest=manifest, attempt=push_id)
    header.staging_ttl.FromSeconds(ttl_s)
    end = space.total_bytes * percent // 100
    async with grpc.aio.insecure_channel(address) as channel:
        method: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(
            "/genserve.v1.WeightService/PushWeights"
        )
        call = method()
        await call.write(header_frame(header))
        async for offset, pieces in space.chunks([(0, end)] if end else [], CHUNK_BYTES):
            await call.write(chunk_frame(offset, pieces, checksum=True))
        if percent == 100:
            await call.write(END_FRAME)
            await call.done_writing()
        print(f"sent {end}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    address, checkpoint, version, push_id, percent, ttl_s = sys.argv[1:]
    asyncio.run(push(address, checkpoint, int(version), push_id, int(percent), int(ttl_s)))
