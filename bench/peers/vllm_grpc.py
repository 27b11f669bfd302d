"""vLLM's own gRPC server in Python, which takes and gives token ids, and no text; asked through its generated stub."""

import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench import engines
from bench.processes import PeerProcess, use_packages, with_packages
from bench.traces import Trace, Work, closed_loop
from tests.support.ports import free_port

_OPTIONS = [("grpc.max_reconnect_backoff_ms", 1000)]
"""By default gRPC tries a server that starts slowly again only after minutes."""
_ENVIRONMENT = {"SMG_VLLM_SERVICER_WARMUP": "off"}
"""It tries all shapes of a GPU's steps for minutes: a CPU has nothing to gain, and the mock engine reads the first
token of each prompt as the milliseconds of a step."""


class VllmGrpc:
    """`python -m vllm.entrypoints.launchers.grpc_server`, with the servicer of smg-grpc-servicer."""

    peers: ClassVar[tuple[str, ...]] = ("vllm_grpc", "vllm_grpc_final")
    without_text: ClassVar[tuple[str, ...]] = peers
    is_own_client: ClassVar[bool] = False
    pid = 0
    _process: PeerProcess
    _channel: grpc.aio.Channel
    _num_runs = 0

    async def start(self, checkpoint: Path, directory: Path, stack: AsyncExitStack, flags: Sequence[str] = ()) -> None:
        """Starts it, and waits until its health says SERVING."""
        use_packages()
        port = free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.launchers.grpc_server"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--model", str(checkpoint), *engines.flags(), *flags]
        log = directory / "vllm_grpc.log"
        self._process = PeerProcess(
            "vllm_grpc", command, log, {**engines.ENVIRONMENT, **_ENVIRONMENT, **with_packages()}
        )
        stack.callback(self._process.stop)
        self.pid = self._process.pid
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS)
        self._channel = await stack.enter_async_context(channel)
        await self._process.wait_until(self._is_serving)

    async def _is_serving(self) -> bool:
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def generate(self, peer: str, work: Work) -> list[Trace]:
        """One call for each request."""
        from smg_grpc_proto import vllm_engine_pb2 as messages
        from smg_grpc_proto import vllm_engine_pb2_grpc

        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)
        self._num_runs += 1
        sampling = messages.SamplingParams(
            temperature=0.0, max_tokens=work.max_tokens, ignore_eos=True, logprobs=0 if work.logprobs else None
        )

        async def stream(number: int, prompt: list[int]) -> Trace:
            request = messages.GenerateRequest(
                request_id=f"{self._num_runs}-{number}",
                tokenized=messages.TokenizedInput(input_ids=prompt),
                sampling_params=sampling,
                stream=not work.final_only,
            )
            trace = Trace(time.monotonic())
            call = stub.Generate(request)
            while (message := await call.read()) is not grpc.aio.EOF:
                # The final message repeats all tokens of a stream, which has them already.
                part = message.complete if work.final_only else message.chunk
                if token_ids := part.output_ids if work.final_only else part.token_ids:
                    trace.arrived_at.append(time.monotonic())
                    trace.token_ids += token_ids
                    if work.logprobs:
                        trace.logprobs += part.output_logprobs.token_logprobs
            return trace

        return await closed_loop(work, stream)
