"""genserve's daemon: one call a request and one call for all, each through the client and through the generated stub.

The difference between client and stub is what the client's own objects cost.
"""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

import grpc.aio

from bench.genserve_daemon import start_daemon
from bench.processes import PeerError
from bench.traces import Trace, Work, closed_loop
from genserve.client import AsyncClient
from genserve.errors import GenserveError
from genserve.v1 import generation_pb2, generation_pb2_grpc, types_pb2
from tests.support.daemon_process import DaemonProcess


class Genserve:
    """`genserve serve`."""

    peers: ClassVar[tuple[str, ...]] = (
        "genserve_generate",
        "genserve_generate_stub",
        "genserve_generate_final",
        "genserve_many",
        "genserve_many_stub",
        "genserve_many_final",
    )
    without_text: ClassVar[tuple[str, ...]] = ()
    is_own_client: ClassVar[bool] = False
    pid = 0
    _flags: ClassVar[tuple[str, ...]] = ()
    _daemon: DaemonProcess
    _client: AsyncClient
    _channel: grpc.aio.Channel

    async def start(self, checkpoint: Path, directory: Path, stack: AsyncExitStack, flags: Sequence[str] = ()) -> None:
        """Starts it, and waits until it says that it is serving."""
        self._daemon = daemon = await start_daemon(checkpoint, directory, stack, flags=[*self._flags, *flags])
        self.pid = daemon.process.pid
        self._client = await stack.enter_async_context(AsyncClient(daemon.address))
        self._channel = await stack.enter_async_context(grpc.aio.insecure_channel(daemon.address))

    async def generate(self, peer: str, work: Work) -> list[Trace]:
        """In one of the ways."""
        try:
            return await self._generate(peer, work)
        except (GenserveError, grpc.aio.AioRpcError) as error:
            raise PeerError(peer, f"{error}\n{self._daemon.stderr[-3000:]}") from error

    async def _generate(self, peer: str, work: Work) -> list[Trace]:
        match peer.removeprefix("genserve_").removesuffix("_final"):
            case "generate" | "3_frontends":
                return await closed_loop(work, self._streamer(work))
            case "generate_stub":
                return await closed_loop(work, self._stub_streamer(work))
            case "many" | "3_frontends_many":
                return await self._many(work)
            case "many_stub":
                return await self._many_stub(work)
            case _:
                raise PeerError(peer, "there is no such way")

    def _streamer(self, work: Work) -> Any:
        options = _options(work)

        async def stream(number: int, prompt: list[int]) -> Trace:
            trace = Trace(time.monotonic())
            async with self._client.stream(prompt, **options) as deltas:
                async for delta in deltas:
                    _add(trace, delta, work)
            return trace

        return stream

    def _stub_streamer(self, work: Work) -> Any:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)

        async def stream(number: int, prompt: list[int]) -> Trace:
            trace = Trace(time.monotonic())
            call = stub.Generate(_request(work, prompt))
            while (message := await call.read()) is not grpc.aio.EOF:
                _add(trace, message, work)
            return trace

        return stream

    async def _many(self, work: Work) -> list[Trace]:
        options = _options(work)
        traces: list[Trace] = []
        async with self._client.stream_many() as many:

            async def submit() -> None:
                number = len(traces)
                traces.append(Trace(time.monotonic()))
                await many.submit(work.prompts[number], request_id=str(number), **options)
                if len(traces) == len(work.prompts):
                    await many.done()

            for _ in range(min(work.concurrency, len(work.prompts))):
                await submit()
            async for item in many:
                if item.error is not None:
                    raise item.error
                _add(traces[int(item.request_id)], item.delta, work)
                if item.is_last and len(traces) < len(work.prompts):
                    await submit()
        return traces

    async def _many_stub(self, work: Work) -> list[Trace]:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)
        traces: list[Trace] = []
        call = stub.GenerateMany()

        async def submit() -> None:
            number = len(traces)
            traces.append(Trace(time.monotonic()))
            request = _request(work, work.prompts[number], str(number))
            await call.write(generation_pb2.GenerateManyRequest(generate=request))
            if len(traces) == len(work.prompts):
                await call.done_writing()

        for _ in range(min(work.concurrency, len(work.prompts))):
            await submit()
        while (message := await call.read()) is not grpc.aio.EOF:
            for item in message.items:
                if item.HasField("error"):
                    raise PeerError("genserve_many_stub", str(item.error))
                _add(traces[int(item.request_id)], item.response, work)
                if item.response.HasField("usage") and len(traces) < len(work.prompts):
                    await submit()
        return traces


class GenserveFrontEnds(Genserve):
    """`genserve serve --frontends 3`: three processes that serve one engine."""

    peers: ClassVar[tuple[str, ...]] = ("genserve_3_frontends", "genserve_3_frontends_many")
    _flags: ClassVar[tuple[str, ...]] = ("--frontends", "3")


def _add(trace: Trace, message: Any, work: Work) -> None:
    """A message or the client's delta: both have outputs with the same names."""
    for output in message.outputs:
        if token_ids := output.token_ids:
            trace.arrived_at.append(time.monotonic())
            trace.token_ids += token_ids
            if work.logprobs:
                trace.logprobs += output.logprobs.sampled
        if work.text:
            trace.texts.append(output.text)


def _options(work: Work) -> dict[str, Any]:
    options: dict[str, Any] = {"max_tokens": work.max_tokens, "ignore_eos": True, "temperature": 0.0}
    options |= {"text": work.text, "logprobs": 0 if work.logprobs else None}
    return {**options, "stream_interval": 0} if work.final_only else options


def _request(work: Work, prompt: list[int], request_id: str = "") -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=types_pb2.TokenIds(ids=prompt),
        sampling=generation_pb2.Sampling(temperature=0.0),
        stop=generation_pb2.Stop(max_tokens=work.max_tokens, ignore_eos=True),
        output=generation_pb2.Output(
            text=work.text, logprobs=0 if work.logprobs else None, stream_interval=0 if work.final_only else 1
        ),
    )
