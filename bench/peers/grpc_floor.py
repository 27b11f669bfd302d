"""The least that a gRPC server in Python costs: AsyncLLM in the process of a grpc.aio server that writes the bytes of
token ids, and of what else is asked for, and a client that reads them. No protobuf, no errors, no bookkeeping.

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
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

import grpc.aio

from bench import engines
from bench.processes import Program, obey, serving_port
from bench.traces import OUTPUTS, Trace, Work, closed_loop

_SERVICE = "floor.Floor"
_REQUEST = struct.Struct("<IIII")  # number of the request, tokens it may have, place in OUTPUTS, tokens that follow
_ANSWER = struct.Struct("<IIII")  # number, tokens, log-probabilities and bytes of text that follow


class GrpcFloor:
    """The program, seen from the harness."""

    peers: ClassVar[tuple[str, ...]] = ("grpc_floor", "grpc_floor_many")
    without_text: ClassVar[tuple[str, ...]] = ()
    is_own_client: ClassVar[bool] = False
    pid = 0
    _program: Program
    _channel: grpc.aio.Channel

    async def start(self, checkpoint: Path, directory: Path, stack: AsyncExitStack, flags: Sequence[str] = ()) -> None:
        """Starts the program and its engine."""
        log = directory / "grpc_floor.log"
        self._program = Program.of_module(
            "grpc_floor", __name__, str(checkpoint), *flags, log=log, env=engines.ENVIRONMENT
        )
        stack.callback(self._program.stop)
        self.pid = self._program.pid
        await self._program.wait_ready()
        address = f"127.0.0.1:{await self._program.order()}"
        self._channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))

    async def generate(self, peer: str, work: Work) -> list[Trace]:
        """In one of the two ways."""
        return await (self._many(work) if peer == "grpc_floor_many" else closed_loop(work, self._streamer(work)))

    def _streamer(self, work: Work) -> Any:
        method: Any = self._channel.unary_stream(f"/{_SERVICE}/One")

        async def stream(number: int, prompt: list[int]) -> Trace:
            trace = Trace(time.monotonic())
            call = method(_request(0, work, prompt))
            while (message := await call.read()) is not grpc.aio.EOF:
                read(message, 0, time.monotonic(), [trace])
            return trace

        return stream

    async def _many(self, work: Work) -> list[Trace]:
        traces: list[Trace] = []
        method: Any = self._channel.stream_stream(f"/{_SERVICE}/Many")
        call = method()

        async def submit() -> None:
            number = len(traces)
            traces.append(Trace(time.monotonic()))
            await call.write(_request(number, work, work.prompts[number]))
            if len(traces) == len(work.prompts):
                await call.done_writing()

        for _ in range(min(work.concurrency, len(work.prompts))):
            await submit()
        while (message := await call.read()) is not grpc.aio.EOF:
            now, position = time.monotonic(), 0
            while position < len(message):
                trace, position = read(message, position, now, traces)
                if len(trace.token_ids) == work.max_tokens and len(traces) < len(work.prompts):
                    await submit()
        return traces


def _request(number: int, work: Work, prompt: list[int]) -> bytes:
    head = _REQUEST.pack(number, work.max_tokens, OUTPUTS.index(work.outputs), len(prompt))
    return head + array("I", prompt).tobytes()


def answer(number: int, output: Any) -> bytes:
    flat, text = output.logprobs, output.text.encode()
    logprobs = [] if flat is None else [flat.logprobs[start] for start in flat.start_indices]
    head = _ANSWER.pack(number, len(output.token_ids), len(logprobs), len(text))
    return b"".join((head, array("I", output.token_ids).tobytes(), array("f", logprobs).tobytes(), text))


def read(message: bytes, position: int, now: float, traces: list[Trace]) -> tuple[Trace, int]:
    """Adds one answer to its trace; the trace, and where the next answer begins."""
    number, num_tokens, num_logprobs, num_bytes = _ANSWER.unpack_from(message, position)
    trace = traces[number]
    position += _ANSWER.size
    trace.arrived_at.append(now)
    trace.token_ids += array("I", message[position : position + 4 * num_tokens])
    position += 4 * num_tokens
    if num_logprobs:
        trace.logprobs += array("f", message[position : position + 4 * num_logprobs])
        position += 4 * num_logprobs
    if num_bytes:
        trace.texts.append(message[position : position + num_bytes].decode())
        position += num_bytes
    return trace, position


async def main(checkpoint: str, *flags: str) -> None:
    """Starts the engine and serves."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", checkpoint, *engines.flags(), *flags]))
    llm = AsyncLLM.from_engine_args(args)
    num_requests = 0

    async def answers(request: bytes) -> Any:
        nonlocal num_requests
        num_requests += 1
        number, max_tokens, outputs, _ = _REQUEST.unpack_from(request)
        work = Work([], 0, max_tokens, outputs=OUTPUTS[outputs])
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            detokenize=work.text,
            logprobs=0 if work.logprobs else None,
            flat_logprobs=work.logprobs,
        )
        prompt: Any = {"prompt_token_ids": list(array("I", request[_REQUEST.size :]))}
        async for output in llm.generate(prompt, params, str(num_requests)):
            yield answer(number, output.outputs[0])

    async def one(request: bytes, context: Any) -> None:
        async for answer in answers(request):
            await context.write(answer)

    async def many(requests: Any, context: Any) -> None:
        ready, waiting = asyncio.Event(), bytearray()

        async def run(request: bytes) -> None:
            async for answer in answers(request):
                waiting.extend(answer)
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
    uvloop.run(main(*sys.argv[1:]))
