"""The least that forwarding costs in Python: a grpc.aio server that passes bytes on to one daemon, and knows nothing of
them. `python -m bench.fleet.byte_proxy ADDRESS` prints where it listens."""

import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import uvloop

_SERVICE = "genserve.v1.GenerationService"


async def serve(target: str) -> None:
    """Until it is killed."""
    channel = grpc.aio.insecure_channel(target)
    one: Any = channel.unary_stream(f"/{_SERVICE}/Generate")
    many: Any = channel.stream_stream(f"/{_SERVICE}/GenerateMany")

    async def generate(request: bytes, context: Any) -> None:
        async for frame in one(request):
            await context.write(frame)

    async def generate_many(requests: AsyncIterator[bytes], context: Any) -> None:
        call = many(requests)
        await context.send_initial_metadata(())
        async for frame in call:
            await context.write(frame)

    server = grpc.aio.server()
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": grpc.unary_stream_rpc_method_handler(generate),
        "GenerateMany": grpc.stream_stream_rpc_method_handler(generate_many),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
