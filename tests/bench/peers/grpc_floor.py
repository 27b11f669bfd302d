"""The least that a gRPC server in Python costs: AsyncLLM in the process of a grpc.aio server that writes the bytes of
token ids, and a client that reads them. No protobuf, no fields, no errors, no bookkeeping.

`grpc_floor` has a call for each request, `grpc_floor_many` one for all, which brings what there is whenever it can
write. Also the program that serves.
"""

import asyncio
import gc
import os
import struct
import sys
import time
from array import array
from pathlib import Path
from typing import Any, ClassVar

import grpc.aio

from tests.bench import engines
from tests.bench.processes import Program, obey, serving_port
from tests.bench.traces import Trace, Work, closed_loop

_SERVICE = "floor.Floor"
_HEAD = struct.Struct("<III")  # number of the request, tokens it may have, tokens that follow


class GrpcFloor:
    """The program, seen from the harness."""

    peers: ClassVar[tuple[str, ...]] = ("grpc_floor", "grpc_floor_many")
    pid = 0
    _program: Program
    _channel: grpc.aio.Channel

    async def start(self, checkpoint: Path, directory: Path) -> None:
        """Starts the program and its engine."""
        log = directory / "grpc_floor.log"
        self._program = Program("grpc_floor", __name__, str(checkpoint), log=log, env=engines.ENVIRONMENT)
        self.pid = self._program.pid
        await self._program.wait_ready()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{await self._program.order()}")

    async def generate(self, peer: str, work: Work) -> list[Trace]:
        """In one of the two ways."""
        return await (self._many(work) if peer == "grpc_floor_many" else closed_loop(work, self._streamer(work)))

    def _streamer(self, work: Work) -> Any:
        method: Any = self._channel.unary_stream(f"/{_SERVICE}/One")

        async def stream(number: int, prompt: list[int]) -> Trace:
            trace = Trace(time.monotonic())
            call = method(_packed(number, work.max_tokens, prompt))
            while (message := await call.read()) is not grpc.aio.EOF:
                trace.arrived_at.append(time.monotonic())
                trace.token_ids += array("I", message)
            return trace

        return stream

    async def _many(self, work: Work) -> list[Trace]:
        traces: list[Trace] = []
        method: Any = self._channel.stream_stream(f"/{_SERVICE}/Many")
        call = method()

        async def submit() -> None:
            number = len(traces)
            traces.append(Trace(time.monotonic()))
            await call.write(_packed(number, work.max_tokens, work.prompts[number]))
            if len(traces) == len(work.prompts):
                await call.done_writing()

        for _ in range(min(work.concurrency, len(work.prompts))):
            await submit()
        while (message := await call.read()) is not grpc.aio.EOF:
            now, numbers = time.monotonic(), array("I", message)
            position = 0
            while position < len(numbers):
                number, _, count = numbers[position : position + 3]
                trace = traces[number]
                trace.arrived_at.append(now)
                trace.token_ids += numbers[position + 3 : position + 3 + count]
                position += 3 + count
                if len(trace.token_ids) == work.max_tokens and len(traces) < len(work.prompts):
                    await submit()
        return traces

    async def stop(self) -> None:
        """Ends it."""
        await self._channel.close()
        self._program.stop()


def _packed(number: int, max_tokens: int, token_ids: Any) -> bytes:
    return _HEAD.pack(number, max_tokens, len(token_ids)) + array("I", token_ids).tobytes()


async def main(checkpoint: str) -> None:
    """Starts the engine and serves."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", checkpoint, *engines.flags()]))
    llm = AsyncLLM.from_engine_args(args)
    num_requests = 0

    async def outputs(request: bytes) -> Any:
        nonlocal num_requests
        num_requests += 1
        _, max_tokens, _ = _HEAD.unpack_from(request)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            detokenize=False,
        )
        prompt: Any = {"prompt_token_ids": list(array("I", request[_HEAD.size :]))}
        async for output in llm.generate(prompt, params, str(num_requests)):
            yield output.outputs[0].token_ids

    async def one(request: bytes, context: Any) -> None:
        async for token_ids in outputs(request):
            await context.write(array("I", token_ids).tobytes())

    async def many(requests: Any, context: Any) -> None:
        ready, waiting = asyncio.Event(), bytearray()

        async def run(request: bytes) -> None:
            number, max_tokens, _ = _HEAD.unpack_from(request)
            async for token_ids in outputs(request):
                waiting.extend(_packed(number, max_tokens, token_ids))
                ready.set()

        async def read() -> None:
            async with asyncio.TaskGroup() as running:
                async for request in requests:
                    running.create_task(run(request))

        reading = asyncio.create_task(read())
        reading.add_done_callback(lambda _: ready.set())
        while not reading.done() or waiting:
            await ready.wait()
            ready.clear()
            if waiting:
                message = bytes(waiting)
                waiting.clear()
                await context.write(message)

    server = grpc.aio.server()
    handlers: dict[str, Any] = {
        "One": grpc.unary_stream_rpc_method_handler(one),
        "Many": grpc.stream_stream_rpc_method_handler(many),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = await serving_port(server)
    gc.collect()
    gc.freeze()  # as vLLM's servers and genserve's daemon do once they have started

    async def tell_port() -> int:
        return port

    await obey(tell_port)
    await server.stop(None)
    llm.shutdown()


if __name__ == "__main__":
    import uvloop

    os.environ.update(engines.ENVIRONMENT)
    uvloop.run(main(sys.argv[1]))
